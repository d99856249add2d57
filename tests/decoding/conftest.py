"""Fixtures of all tests of decoding."""
from tests.decoding.pictures import minute, tiny, twins  # noqa: F401
from tests.decoding.toys import pair  # noqa: F401
