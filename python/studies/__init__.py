"""The papers' tables and figures on one's own model. `specvis report` writes them."""
