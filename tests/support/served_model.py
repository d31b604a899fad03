"""A transformers model behind the plugin's routes for weights and scores."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentic_opd import __version__
from agentic_opd.training.model import tied_names
from tests.unit.distill.fakes import b64


class Server:
    """A model behind the plugin's routes. It takes the tensors that its own checkpoint has, and no others."""

    def __init__(self, model: Path, dtype: str, *, adapters: int = 0) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        tied = bool(tied_names(self.model))
        self.names = {name for name in self.model.state_dict() if not (tied and name == "lm_head.weight")}
        limits = {"model": "m", "max_model_len": 999, "max_logprobs": 9, "vocab_size": 10**6, "weight_version": 0}
        self.info = {**limits, "plugin_version": __version__, "dtype": dtype, "tied_embeddings": tied}
        self.info |= {"logprobs_mode": "raw_logprobs"}
        self.info |= {"max_adapters": adapters, "max_lora_rank": 8 * adapters}
        self.refused_version: int | None = None

    @property
    def version(self) -> Any:
        """The weights' version."""
        return self.info["weight_version"]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            rows = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
        return rows[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    def reload(self, body: dict[str, Any]) -> dict[str, Any]:
        self._note(body)
        weights = load_file(Path(body["path"]) / "model.safetensors")
        assert weights.keys() == self.names
        self.model.load_state_dict(weights, strict=False)
        return {}

    def _note(self, body: dict[str, Any]) -> None:
        assert body["version"] != self.refused_version
        self.info["weight_version"] = body["version"]

    def load_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        from peft import PeftModel

        self._note(body)
        base = self.model.unload() if isinstance(self.model, PeftModel) else self.model
        self.model = PeftModel.from_pretrained(base, body["path"]).eval()
        return {}

    def score(self, body: dict[str, Any]) -> dict[str, Any]:
        (sequence,) = body["sequences"]
        actual = self.logprobs(sequence["token_ids"]).numpy()
        top = {"num_scored": len(actual), "top_k": 1, "actual_logprobs": b64(actual, "<f4")}
        best = torch.full((len(actual), 1), -50.0).numpy()  # No row of a probe is looked at beyond its own token.
        return {"results": [{**top, "top_token_ids": b64(best * 0, "<i4"), "top_logprobs": b64(best, "<f4")}]}

    @property
    def handlers(self) -> dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        def handler(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
            async def handle(request: web.Request) -> web.StreamResponse:
                return web.json_response(answer(json.loads(await request.text() or "null")))

            return handle

        routes = {"reload_weights": self.reload, "load_adapter": self.load_adapter, "score": self.score}
        routes["info"] = lambda _: self.info
        return {f"/v1/opd/{name}": handler(answer) for name, answer in routes.items()}
