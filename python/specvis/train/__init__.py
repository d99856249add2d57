"""The training of the shipped model: `python -m specvis.train STAGE`, see __main__.py."""
