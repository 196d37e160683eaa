"""Entry point of `diffquant` and `python -m diffquant`, which also reports an interrupt during imports."""

import sys

from diffquant.support.program import exit_codes, watch_signals


def main() -> None:
    """Run the command line."""
    watch_signals()
    try:
        from diffquant.verbs.cli.command import app
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("diffquant"):
            raise
        from diffquant.support.installation import install_command

        sys.stderr.write(f"diffquant needs {error.name}, which is not installed: {install_command()}\n")
        raise SystemExit(5) from None
    with exit_codes():
        app()


if __name__ == "__main__":
    main()
