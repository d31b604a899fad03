"""An Atropos environment that knows nothing of this package: two turns through a ManagedServer, scored by length.

python -m tests.support.plain_environment process --env.data_path_to_save_groups FILE ...
"""

from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

FIRST = ("Write `fizzbuzz(n)` in solution.py.", "Write `flatten(nested)` in solution.py.")
SECOND = "It fails with an error for me."


class PlainEnv(BaseEnv):
    """Asks for something, complains, and takes the longer answers for the better ones."""

    name = "plain"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked = 0

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Nothing but names; the rest comes from flags."""
        return BaseEnvConfig(group_size=2, total_steps=2), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        """There is nothing to prepare."""

    async def get_next_item(self) -> str:
        """The next request."""
        self.asked += 1
        return FIRST[self.asked % len(FIRST)]

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to evaluate."""

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[str]]:
        """A group of conversations of two turns."""
        group: dict[str, list[Any]] = {name: [] for name in ("tokens", "masks", "scores", "messages")}
        for _ in range(self.config.group_size):
            messages = [{"role": "user", "content": item}]
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                for answer in (SECOND, None):
                    done = await managed.chat_completion(messages=messages, n=1, max_tokens=96, temperature=1.0)
                    messages = [*messages, {"role": "assistant", "content": done.choices[0].message.content}]
                    if answer is not None:
                        messages.append({"role": "user", "content": answer})
                nodes = managed.get_state()["nodes"]
            group["tokens"].append(nodes[-1].tokens)
            group["masks"].append(nodes[-1].masked_tokens)
            group["scores"].append(float(len(nodes[-1].tokens)))
            group["messages"].append(messages)
        return ScoredDataGroup(**group), []  # type: ignore[typeddict-item]


if __name__ == "__main__":
    PlainEnv.cli()
