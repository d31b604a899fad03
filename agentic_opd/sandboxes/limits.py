"""What the processes of one sandbox may use, whatever its backend."""

from dataclasses import dataclass

from agentic_opd.sandboxes.config import SandboxConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """What the processes of one sandbox may use."""

    memory_mb: int = 1024
    """Address space of each process, in MiB; with docker, memory of the sandbox."""
    file_mb: int = 64
    """Size of each written file, in MiB."""
    processes: int = 256
    """Processes and threads of one sandbox at a time; not limited by swerex and unsafe-local."""
    output_bytes: int = 4 * 2**20
    """Bytes of output of one command."""
    disk_mb: int = 512
    """Size of everything that a sandbox keeps on disk, in MiB; not limited by swerex."""

    @staticmethod
    def from_config(config: SandboxConfig) -> "Limits":
        """The limits that the settings name."""
        return Limits(
            memory_mb=config.sandbox_memory_mb, file_mb=config.sandbox_file_mb, disk_mb=config.sandbox_disk_mb
        )
