"""The client of vLLM servers with the plugin: `PluginClient` samples, scores and loads weights; see `serving` for the
server's side. Servers without the plugin are used through vLLM's own `/v1/completions`.
"""
