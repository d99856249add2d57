"""The items of `specvis report`, in the report's order."""
from . import adt_tree, cool_sd, cspd, general, jacobi, lantern, peanut

ITEMS = {"trade-off": general.ITEMS["trade-off"], **jacobi.ITEMS, **lantern.ITEMS, **adt_tree.ITEMS, **peanut.ITEMS,
         **cool_sd.ITEMS, "latency": general.ITEMS["latency"]}
CONTINUOUS_ITEMS = cspd.ITEMS
