"""specialized-decode: decode, make-checkpoint, doctor."""

from typing import Any

import click

from specialized_decode import __version__
from specialized_decode.backbone.errors import InputError
from specialized_decode.cli.checkpoint import make_checkpoint
from specialized_decode.cli.decode import decode
from specialized_decode.cli.doctor import doctor
from specialized_decode.runtime import UnsupportedTarget


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (InputError, UnsupportedTarget) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="specialized-decode")
def main() -> None:
    """Decodes DeepSeek-V4.1 on captured steps, and says what this machine can run."""


main.add_command(decode)
main.add_command(doctor)
main.add_command(make_checkpoint)

if __name__ == "__main__":
    main(prog_name="specialized-decode")
