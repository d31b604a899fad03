"""Attachments of a sequence, which are pictures: in messages, prompts, files and requests.

Other subpackages carry `core.types.Attachments` with the tokens and pass them to these functions. Only `gateway`, which
decodes what clients send, `serving`, which shows it to the model, and `training` know what they are.
"""
