"""The shipped policy and the adapter for mini-swe-agent's format -> one checkpoint for vLLM and transformers."""

from pathlib import Path

from install.active_environment import command_parser

from agentic_opd.core.errors import ConfigError
from agentic_opd.training.config import TrainerConfig
from demo_policy import POLICY_DIR
from demo_policy.mini_swe_agent import ADAPTER_DIR


def write_merged(folder: Path, adapter: Path = ADAPTER_DIR, policy: Path = POLICY_DIR) -> None:
    """Write the checkpoint of `policy` with `adapter` merged in; one that is in `folder` is replaced.

    Raises:
        ConfigError: peft is missing, or the policy can't be loaded.
        OutputError: it can't be written.
        OSError: there is no such adapter.
    """
    from agentic_opd.training.model import load_model, save_weights  # Torch: seconds that --help need not take.

    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError("adapters need peft: install agentic-opd[train]") from error
    base = load_model(TrainerConfig(model=str(policy)), "cpu")
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_weights(PeftModel.from_pretrained(base, adapter), str(policy), folder)


def main() -> None:
    parser = command_parser(__doc__, "scripts/demo_policy/mini_swe_policy")
    parser.add_argument("out", type=Path, help="the checkpoint's folder")
    parser.add_argument("--adapter", type=Path, default=ADAPTER_DIR, help="in peft's files (default: the shipped one)")
    arguments = parser.parse_args()
    write_merged(arguments.out, arguments.adapter)


if __name__ == "__main__":
    main()
