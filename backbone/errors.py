"""Errors a user can cause: each names the file or flag, the key, what was found and what was expected."""


class InputError(ValueError):
    """Bad input. The message is complete in itself; the command line prints it without a traceback."""


class ConfigError(InputError):
    """A `config.json` that does not describe a DeepSeek-V4.1 text model this package can run."""


class CheckpointError(InputError):
    """A model folder whose index, shards or tensors are missing, truncated or misshapen."""


class PromptError(InputError):
    """A prompt or a generation request that does not fit the model."""
