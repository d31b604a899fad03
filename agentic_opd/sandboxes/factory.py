"""The settings -> sandboxes of the backend that they name.

    bubblewrap   bubblewrap.py   Linux namespaces on this machine: the default
    docker       docker.py       containers of Docker or podman, by their command line
    swerex       swerex.py       a SWE-ReX server, on this machine or a remote one; extra [swerex]

What the settings name is what is used: a backend that does not work is an error, never a reason for another one.
"""

from collections.abc import Sequence

from agentic_opd.core.errors import ConfigError
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.config import SandboxConfig
from agentic_opd.sandboxes.docker import DockerSandbox
from agentic_opd.sandboxes.pool import pooled
from agentic_opd.sandboxes.protocol import Limits, Mount, SandboxFactory


def sandbox_factory(config: SandboxConfig, mounts: Sequence[Mount] = ()) -> SandboxFactory:
    """The factory of the backend that `config` names; `mounts` are what sandboxes see of this machine in addition.

    Raises:
        ConfigError: That backend can't mount anything.
        SandboxError: That backend's extra is not installed.
    """
    limits = Limits.from_config(config)
    if mounts and config.sandbox_backend not in ("bubblewrap", "docker"):
        raise ConfigError(f"sandbox_backend {config.sandbox_backend} mounts nothing; use bubblewrap or docker")
    most, warm = config.sandbox_max_concurrent, config.sandbox_warm
    make = _maker(config, limits, mounts)
    if most is None and not warm:
        return make
    kind = (config.sandbox_container_command, config.sandbox_image, limits, tuple(mounts))
    return pooled(make, kind, most, warm)


def _maker(config: SandboxConfig, limits: Limits, mounts: Sequence[Mount]) -> SandboxFactory:
    match config.sandbox_backend:
        case "bubblewrap":
            return lambda: BubblewrapSandbox(limits, mounts)
        case "docker":
            return lambda: DockerSandbox(config.sandbox_container_command, config.sandbox_image, limits, mounts)
        case "swerex":
            from agentic_opd.sandboxes.swerex import SwerexSandbox

            url = config.sandbox_swerex_servers.get(config.sandbox_image, config.sandbox_swerex_url)
            token = config.sandbox_swerex_token
            assert url is not None
            assert token is not None
            return lambda: SwerexSandbox(url, token, limits)


async def check_sandbox(factory: SandboxFactory) -> None:
    """Raise SandboxError unless sandboxes of this factory work here; for start-up.

    Also removes what earlier runs that were killed have left behind.
    """
    async with factory() as sandbox:
        await sandbox.check()
