"""One request of the engine, from ids to its final output, without turning logprobs into Python objects on the way."""

import asyncio
from uuid import uuid4

from vllm.engine.protocol import EngineClient
from vllm.exceptions import RetryableRequestError
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors


class KeepTensors(LogprobsProcessor):
    """Leaves prompt logprobs as the engine's tensors.

    vLLM's own makes Python objects of every entry of every row, on the thread that serves all requests: 50 ms for a
    prompt of 3000 tokens at 50 logprobs each, of which 150 rows are wanted.
    """

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        self.prompt_logprobs = prompt_logprobs_tensors  # type: ignore[assignment]  # RequestOutput hands it on as it is


async def final_output(engine: EngineClient, prompt: EngineInput, params: SamplingParams) -> RequestOutput:
    """Run one request to its end; cancelling this aborts it in the engine.

    Args:
        engine: The server's engine.
        prompt: What it reads.
        params: Must ask for `FINAL_ONLY` output. With `flat_logprobs`, prompt logprobs come back as `LogprobsTensors`
            where the engine is vLLM's own, and as `FlatLogprobs` elsewhere.

    Raises:
        VLLMClientError: the engine refuses the request.
        VLLMServerError: the engine is dead, or gave the request up.
    """
    request_id = f"opd-{uuid4().hex}"
    if params.flat_logprobs and params.prompt_logprobs is not None and isinstance(engine, AsyncLLM):
        output = await _with_tensors(engine, prompt, params, request_id)
    else:
        output = [output async for output in engine.generate(prompt, params, request_id)][-1]
    if any(completion.finish_reason in ("abort", "error") for completion in output.outputs):
        raise RetryableRequestError("the engine gave the request up before it was done; ask again")
    return output


async def _with_tensors(
    engine: AsyncLLM, prompt: EngineInput, params: SamplingParams, request_id: str
) -> RequestOutput:
    collector = await engine.add_request(request_id, prompt, params)
    state = engine.output_processor.request_states.get(collector.request_id)
    if state is not None and state.logprobs_processor is not None:
        state.logprobs_processor = KeepTensors(**vars(state.logprobs_processor))
    try:
        output = await collector.get()
    except asyncio.CancelledError:
        await engine.abort(collector.request_id, internal=True)
        raise
    finally:
        collector.close()
    assert isinstance(output, RequestOutput)
    return output
