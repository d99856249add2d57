"""`python -m specvis.train`: see main.py."""
from ..interrupts import quiet

if __name__ == "__main__":
    with quiet():
        from .main import main

        main(prog_name="python -m specvis.train")
