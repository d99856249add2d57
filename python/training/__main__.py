"""`python -m training`: see main.py."""
from specvis.interrupts import quiet

if __name__ == "__main__":
    with quiet():
        from .main import main

        main(prog_name="python -m training")
