"""A request with a seed whose prompt is read in parts, on a runner that does to generators what vLLM's does."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from agentic_opd.serving.cpu.seeded_sampling import restore_generators


def make_runner() -> Any:
    class Runner:
        """Draws a number for each request, and winds back the generator where the sample is dropped."""

        def __init__(self, dropped: list[bool]) -> None:
            generators = {index: torch.Generator().manual_seed(7) for index in range(len(dropped))}
            self.input_batch = SimpleNamespace(num_reqs=len(dropped), generators=generators)
            self.discard_request_mask = SimpleNamespace(np=np.array([*dropped, True]))

        def _sample(self) -> list[float]:
            generators = self.input_batch.generators
            return [torch.rand(1, generator=generators[index]).item() for index in sorted(generators)]

        def _bookkeeping_sync(self) -> None:
            for index in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
                generator = self.input_batch.generators.get(int(index))
                if generator is not None:
                    generator.set_offset(generator.get_offset() - 4)

        def step(self) -> list[float]:
            sampled = self._sample()
            self._bookkeeping_sync()
            return sampled

    restore_generators(Runner)
    return Runner


def test_a_dropped_sample_leaves_the_seed_as_it_was() -> None:
    runner = make_runner()([False, True])
    whole, in_parts = runner.step()
    assert whole == in_parts
    assert sorted(runner.input_batch.generators) == [0, 1], "both requests keep their generators"
    runner.discard_request_mask.np[1] = False
    second_of_whole, first_of_parts = runner.step()
    assert first_of_parts == whole != second_of_whole
