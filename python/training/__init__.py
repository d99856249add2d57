"""The training of the shipped models: `python -m training STAGE`, see main.py."""
