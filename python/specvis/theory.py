import math


def omega_schedule(delta, nu, L):
    return tuple(delta * L * math.exp(-nu * i) * (1 - math.exp(-nu)) / (1 - math.exp(-nu * L)) if nu else delta
                 for i in range(L))
