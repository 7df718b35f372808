"""`doctor`: what this machine and deployment can run, and all that is missing, at once."""

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from specialized_decode import __version__
from specialized_decode.backbone.config import ModelConfig
from specialized_decode.backbone.errors import InputError
from specialized_decode.backbone.folder import ModelFolder
from specialized_decode.backbone.tensors import text_tensors
from specialized_decode.backbone.tokenizer import compressed_token_map, load_tokenizer
from specialized_decode.integration.inspect import deployment_rows
from specialized_decode.runtime.tuning import gpu_family

TORCH = (2, 11)
DEPLOYMENTS = ("cpu", "cuda", "vllm")


@dataclass(frozen=True)
class Requirement:
    """One requirement: what was found, what is expected, and what would satisfy it when it is not met."""

    name: str
    ok: bool
    found: str
    expected: str
    remedy: str


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "--deployment",
    type=click.Choice(DEPLOYMENTS),
    help="cpu, cuda: `decode` on this machine. vllm: serving.  [default: cuda where there is a GPU, else cpu]",
)
@click.option(
    "--tp", type=click.Choice(["1", "2", "4", "8"]), default="1", show_default=True, help="Tensor-parallel size."
)
@click.option(
    "--vllm-args",
    default="",
    metavar="FLAGS",
    help="Flags of `vllm serve`, in one string: the check of --deployment vllm and FOLDER is made for them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(folder: Path | None, deployment: str | None, tp: str, vllm_args: str, as_json: bool) -> None:
    """Checks every requirement of a deployment, and of the model in FOLDER if given.

    Exit code 0 when all are met, 1 when any is not.
    """
    deployment = deployment or ("cuda" if torch.cuda.is_available() else "cpu")
    if vllm_args and (deployment != "vllm" or folder is None):
        raise click.UsageError("--vllm-args needs --deployment vllm and FOLDER.")
    try:
        flags = shlex.split(vllm_args)
    except ValueError as error:
        raise click.UsageError(f"--vllm-args: {error}.") from error
    rows = requirements(deployment, int(tp), folder, flags)
    runs = all(row.ok for row in rows)
    if as_json:
        report = {"version": __version__, "deployment": deployment, "runs": runs}
        click.echo(json.dumps({**report, "requirements": [asdict(row) for row in rows]}, indent=1))
    else:
        _print(deployment, rows, runs)
    sys.exit(0 if runs else 1)


def requirements(deployment: str, tp: int, folder: Path | None, flags: Sequence[str] = ()) -> list[Requirement]:
    """Every requirement of `deployment` on `tp` devices, in the order they are best satisfied in.

    flags: those of `vllm serve`.
    """
    rows = [_python()]
    if deployment == "vllm":
        rows += [Requirement(**asdict(row)) for row in deployment_rows(tp, folder, flags)] + [_plugin()]
    else:
        rows += [_torch(), _single_process(tp)]
    if deployment == "cuda":
        rows += [_gpu(), _gpu_count(tp), _peer_access(tp)]
    return rows + (_folder(folder, deployment, tp) if folder is not None else [])


def _print(deployment: str, rows: list[Requirement], runs: bool) -> None:
    click.echo(f"specialized-decode {__version__}, deployment {deployment}")
    for row in rows:
        found = row.found.replace("\n", "\n          ")
        click.echo(f"  {'ok     ' if row.ok else 'MISSING'} {row.name}: {found}")
        if not row.ok:
            click.echo(f"          expected {row.expected}; {row.remedy}")
    missing = sum(not row.ok for row in rows)
    click.echo("can run" if runs else f"cannot run: {missing} of {len(rows)} requirements are not met")


def _python() -> Requirement:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Requirement("Python", sys.version_info >= (3, 11), found, "3.11 or later", "install a later Python")


def _torch() -> Requirement:
    parts = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Requirement("PyTorch", parts >= TORCH, torch.__version__, "2.11 or later", "pip install 'torch>=2.11'")


def _single_process(tp: int) -> Requirement:
    expected, remedy = "1", "serve larger sizes through vLLM: --deployment vllm"
    return Requirement("Tensor parallelism", tp == 1, str(tp), expected, remedy)


def _gpu() -> Requirement:
    expected, remedy = "a Hopper or Blackwell GPU", "run on an H100, H200 or B200, with a driver that torch can use"
    if not torch.cuda.is_available():
        return Requirement("GPU", False, "none", expected, remedy)
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    try:
        return Requirement("GPU", True, f"{name} ({gpu_family(device)})", expected, remedy)
    except ValueError:
        return Requirement("GPU", False, name, expected, remedy)


def _gpu_count(tp: int) -> Requirement:
    count = torch.cuda.device_count()
    return Requirement(
        "GPUs", count >= tp, str(count), f"at least {tp}", "use a smaller --tp, or a host with more GPUs"
    )


def _peer_access(tp: int) -> Requirement:
    expected, remedy = "peer access among them", "use GPUs of one NVLink domain"
    count = min(tp, torch.cuda.device_count())
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    blocked = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if blocked:
        found = f"GPU {blocked[0][0]} cannot reach GPU {blocked[0][1]}"
    else:
        found = {0: "no GPU", 1: "one GPU"}.get(count, f"{count} GPUs")
    return Requirement("Peer access", not blocked and count > 0, found, expected, remedy)


def _plugin() -> Requirement:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    found = [point.name for point in points if point.value.startswith("specialized_decode.")]
    remedy = "install a release that has the vLLM integration; this one decodes on the local host only"
    return Requirement(
        "vLLM plugin", bool(found), found[0] if found else "none", "an entry point of this package", remedy
    )


def _folder(folder: Path, deployment: str, tp: int) -> list[Requirement]:
    """The model folder's own requirements; each later one needs those before it."""
    repair = "repair the folder, or download the release again"
    room = "free memory, or use a larger machine or tensor-parallel size"
    checks: list[tuple[str, str, Callable[[], str]]] = [
        ("Configuration", "a DeepSeek-V4.1 config.json", lambda: _describe(ModelConfig.from_folder(folder))),
        ("Tensors", "every tensor of the text model, whole", lambda: _check_tensors(folder)),
        ("Tokenizer", "the ids that the configuration counts on", lambda: _check_tokenizer(folder)),
        ("Memory", "room for the weights", lambda: _check_memory(folder, deployment, tp)),
    ]
    rows: list[Requirement] = []
    for name, expected, check in checks:
        remedy = room if name == "Memory" else repair
        try:
            rows.append(Requirement(name, True, check(), expected, remedy))
        except InputError as error:
            rows.append(Requirement(name, False, str(error), expected, remedy))
            if name == "Configuration":
                break
    return rows


def _describe(config: ModelConfig) -> str:
    return f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.n_routed_experts} experts"


def _check_tensors(folder: Path) -> str:
    specs = text_tensors(ModelConfig.from_folder(folder))
    with ModelFolder(folder) as opened:
        opened.check(specs)
    return f"{len(specs)} tensors, {sum(spec.nbytes for spec in specs.values()) / 1e9:.2f} GB"


def _check_tokenizer(folder: Path) -> str:
    config = ModelConfig.from_folder(folder)
    size = compressed_token_map(load_tokenizer(folder))[1]
    if config.engram_layer_ids and size != config.engram_compressed_vocab_size:
        raise InputError(
            f"{size} compressed ids, not engram_compressed_vocab_size, {config.engram_compressed_vocab_size}"
        )
    return f"{size} compressed ids"


def _check_memory(folder: Path, deployment: str, tp: int) -> str:
    """A rank's share of the weights as they are stored, against the free memory of its device: what no deployment
    can do with less than."""
    specs = text_tensors(ModelConfig.from_folder(folder))
    needed = sum(spec.nbytes for spec in specs.values()) // tp
    if deployment == "cpu":
        free = _available_memory()
    else:
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    said = f"{needed / 1e9:.2f} GB of weights, {free / 1e9:.2f} GB free"
    if free < needed:
        raise InputError(said)
    return said


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise InputError("unknown: this system has no MemAvailable line in /proc/meminfo")
