"""The settings -> sandboxes of the backend that they name.

    bubblewrap   bubblewrap.py   Linux namespaces on this machine: the default
    docker       docker.py       containers of Docker or podman, by their command line

The settings decide: a backend that does not work is an error, never a reason for another one.
"""

from collections.abc import Sequence

from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.config import SandboxConfig
from agentic_opd.sandboxes.docker import DockerSandbox
from agentic_opd.sandboxes.pool import pooled
from agentic_opd.sandboxes.protocol import Limits, Mount, SandboxFactory


def sandbox_factory(config: SandboxConfig, mounts: Sequence[Mount] = ()) -> SandboxFactory:
    """Return the factory of the backend that `config` names; the sandboxes also see `mounts` of this machine."""
    limits = Limits.from_config(config)
    match config.sandbox_backend:
        case "bubblewrap":
            make: SandboxFactory = lambda: BubblewrapSandbox(limits, mounts)  # noqa: E731
        case "docker":
            command, image = config.sandbox_container_command, config.sandbox_image
            make = lambda: DockerSandbox(command, image, limits, mounts)  # noqa: E731
    max_concurrent, warm = config.sandbox_max_concurrent, config.sandbox_warm
    if max_concurrent is None and not warm:
        return make
    kind = (config.sandbox_container_command, config.sandbox_image, limits, tuple(mounts))
    return pooled(make, kind, max_concurrent, warm)


async def check_sandbox(factory: SandboxFactory) -> None:
    """Raise SandboxError unless sandboxes of this factory work here; also remove leftovers of killed runs."""
    async with factory() as sandbox:
        await sandbox.check()
