"""The settings -> sandboxes of the backend that they name.

    bubblewrap   bubblewrap.py   Linux namespaces on this machine: the default
    docker       docker.py       containers of Docker or podman, by their command line

The settings decide: a backend that does not work is an error, never a reason for another one.
"""

from collections.abc import Sequence

from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.config import DockerConfig, SandboxConfig
from agentic_opd.sandboxes.docker import DockerSandbox
from agentic_opd.sandboxes.pool import pooled
from agentic_opd.sandboxes.protocol import Limits, Mount, SandboxFactory


def sandbox_factory(config: SandboxConfig, mounts: Sequence[Mount] = ()) -> SandboxFactory:
    """Return the factory of the backend that `config` names; the sandboxes also see `mounts` of this machine."""
    limits = Limits.from_config(config)
    make: SandboxFactory
    if isinstance(config, DockerConfig):
        command, image, warm = config.container_command, config.image, config.warm
        make, kind = lambda: DockerSandbox(command, image, limits, mounts), (command, image, limits, tuple(mounts))
    else:
        make, kind, warm = lambda: BubblewrapSandbox(limits, mounts), ("bubblewrap", limits, tuple(mounts)), 0
    if config.max_concurrent is None and not warm:
        return make
    return pooled(make, kind, config.max_concurrent, warm)


async def check_sandbox(factory: SandboxFactory) -> None:
    """Raise SandboxError unless sandboxes of this factory work here; also remove leftovers of killed runs."""
    async with factory() as sandbox:
        await sandbox.check()
