"""The training of the shipped model: `python -m specvis.train data|tokenizer|gpt|drafter|export`."""
