"""`python -m specvis` is the command `specvis`."""
from .cli.main import main

if __name__ == "__main__":
    main(prog_name="specvis")
