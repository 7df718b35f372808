"""Which captures an executor may take."""

from collections.abc import Iterable

from specialized_decode.runtime.host import Host


def captures_pure_decode(host: Host, swa_prefixes: Iterable[str]) -> bool:
    """Whether the running forward is a FULL capture of a batch that only decodes.

    FULL graphs are captured with runtime mode NONE, PIECEWISE ones with PIECEWISE. swa_prefixes: the sliding-window
    cache groups of the layers; each must have metadata, without prefills.
    """
    if not host.capturing() or host.graph_mode() != "NONE":
        return False
    metadata = host.attention_metadata()
    if not isinstance(metadata, dict):
        return False
    groups = [metadata.get(prefix) for prefix in swa_prefixes]
    return bool(groups) and all(group is not None and group.num_prefills == 0 for group in groups)
