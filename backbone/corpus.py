"""Text that ships with the package; the tokenizer is trained on it."""

from pathlib import Path


def corpus() -> str:
    """All texts in data/, in the order of their names."""
    folder = Path(__file__).parent / "data"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt")))
