"""The command line as `diffquant` and `python -m diffquant` start it: interrupted while it is imported, it says so."""

import sys

from diffquant.support import interruption


def main() -> None:
    """Run the command line."""
    interruption.watch()
    try:
        from diffquant.cli.app import app
        from diffquant.support.program import exit_codes
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
