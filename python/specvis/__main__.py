"""`python -m specvis` and the command `specvis`."""
from .interrupts import quiet


def main():
    with quiet():
        from .cli.main import main as command

        command(prog_name="specvis")


if __name__ == "__main__":
    main()
