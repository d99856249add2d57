"""The items of `specvis report`, in the report's order."""
from . import adt_tree, cool_sd, cspd, distribution, general, jacobi, lantern, parallel, peanut

ITEMS = {"trade-off": general.ITEMS["trade-off"], **jacobi.ITEMS, **lantern.ITEMS, **adt_tree.ITEMS, **peanut.ITEMS,
         **cool_sd.ITEMS, "latency": general.ITEMS["latency"]}
CONTINUOUS_ITEMS = {**cspd.ITEMS, **distribution.ITEMS, **parallel.ITEMS}
