"""The pictures: freely licensed emoji sets from their npm packages, rendered at 64 pixels on white."""
import io
import json
import re
import subprocess
import tarfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
from PIL import Image
from tqdm import tqdm

from specvis.files import reading, remove_leftovers, write_json, write_whole

from .stages import runs_option

SIZE = 64
LONGEST = 10  # words of a caption, the style included
PACKAGES = {  # style: npm package, license of the pictures
    "fluent-3d": ("@lobehub/fluent-emoji-3d@1.1.0", "MIT"),
    "fluent-flat": ("@iconify-json/fluent-emoji-flat@1.2.6", "MIT"),
    "noto": ("@iconify-json/noto@1.2.9", "Apache-2.0"),
}
PEOPLE = "People & Body"
PEOPLE_SHARE = 0.25   # this share of the draws is people; 62 % of the pictures are, mostly one name in many skin tones
PERSON = {"person", "man", "woman", "people", "men", "women", "boy", "girl"}
HELD_OUT_NAMES = 150
TONE = "medium-light|medium-dark|light|medium|dark"  # the longer phrases first


def spelled_out(name: str, category: str) -> str:
    """The Fluent sets shorten "man-pilot-dark-skin-tone" to "man-pilot-dark" at the end of a name."""
    return re.sub(f"-({TONE})$", r"-\1-skin-tone", name) if category == PEOPLE else name


def words_of(name: str) -> list[str]:
    """"waving-hand-dark-skin-tone" -> ["waving", "hand", "skin-dark"]: a skin tone is one word."""
    words = []
    for part in re.split(f"((?:{TONE})-skin-tone)", name):
        if part.endswith("-skin-tone"):
            words.append("skin-" + part.removesuffix("-skin-tone"))
        else:
            words += [word for word in part.split("-") if word]
    return words


def fetch(package: str, folder: Path) -> tarfile.TarFile:
    """The package's archive, from `folder` or through `npm pack` into it."""
    archive = folder / (package.lstrip("@").replace("/", "-").replace("@", "-") + ".tgz")
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            raise click.ClickException(f"`npm pack {package}` failed ({error}); "
                                       f"--packages may name a folder that has {archive.name}") from error
    with reading(archive, "; remove it, and it is fetched again"):
        return tarfile.open(archive)


def on_white(image: Image.Image) -> np.ndarray:
    """Any size and mode, perhaps transparent -> (SIZE, SIZE, 3) uint8."""
    image = image.convert("RGBA")
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return np.asarray(square.convert("RGB").resize((SIZE, SIZE), Image.LANCZOS))


def read(archive: tarfile.TarFile, name: str) -> dict:
    return json.load(archive.extractfile(f"package/{name}"))


def drawings(archive: tarfile.TarFile):
    """(name, picture) of an Iconify set; hidden icons, aliases and extras are left out."""
    import resvg_py  # only this stage needs it

    icons, info = read(archive, "icons.json"), read(archive, "metadata.json")
    extras = {name for group, names in info["categories"].items() if group.startswith("Extras") for name in names}
    for name, icon in tqdm(icons["icons"].items(), desc=icons["prefix"]):
        if icon.get("hidden") or name in extras or name.endswith("-low"):
            continue
        width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
        svg = (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
               f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">{icon["body"]}</svg>')
        png = resvg_py.svg_to_bytes(svg_string=svg, width=2 * SIZE, height=2 * SIZE)
        yield name, on_white(Image.open(io.BytesIO(bytes(png))))


def photographs(archive: tarfile.TarFile, characters: dict[str, str]):
    """(name, picture) of the set of rendered pictures, named by code point."""
    def without_selector(code):
        return re.sub("-?fe0f", "", code)

    names = {without_selector(code): name for code, name in characters.items()}
    files = sorted((m for m in archive.getmembers() if m.name.endswith(".webp")), key=lambda m: m.name)
    for member in tqdm(files, desc="fluent-emoji-3d"):
        name = names.get(without_selector(Path(member.name).stem))
        if name is not None:
            yield name, on_white(Image.open(archive.extractfile(member)))


def sampling_weights_of(categories: list[str], words: list[list[str]]) -> np.ndarray:
    """How often training draws each picture: (N,) float64 of mean 1.

    Pictures of people get PEOPLE_SHARE together. Each of their names gets the same, no matter how many skin tones and
    sexes it comes in. The other categories get the remaining share, in proportion to the square roots of their sizes.
    """
    def subject(w):
        return frozenset(word for word in w if word not in PERSON and not word.startswith("skin-"))

    groups = [subject(w) if category == PEOPLE else category for category, w in zip(categories, words)]
    sizes = Counter(groups)
    roots = {group: size ** 0.5 for group, size in sizes.items() if isinstance(group, str)}
    share = {group: (1 - PEOPLE_SHARE) * root / sum(roots.values()) for group, root in roots.items()}
    people = [group for group in sizes if group not in roots]
    share |= {group: PEOPLE_SHARE / len(people) for group in people}
    return np.array([share[group] / sizes[group] for group in groups]) * len(groups)


def hold_out(names: list[str], words: list[list[str]]) -> np.ndarray:
    """Which pictures are held out: (N,) bool. Names are chosen by a seed, and held out in every style and spelling.

    "deaf-man" and "man-deaf" are one name. A name with a word that no other name has is not held out.
    """
    chosen = set(np.random.default_rng(0).choice(sorted(set(names)), HELD_OUT_NAMES, replace=False))
    held_out = {frozenset(w) for name, w in zip(names, words) if name in chosen}
    known = {word for w in words if frozenset(w) not in held_out for word in w}
    return np.array([frozenset(w) in held_out and known.issuperset(w) for w in words])


@click.command()
@runs_option
@click.option("--packages", type=click.Path(path_type=Path),
              help="Folder of the packages' archives; missing ones are fetched. [default: RUNS/packages]")
def data(runs, packages):
    """Fetch and render the pictures; writes runs/data/pictures.npz, vocabulary.json and manifest.json.

    pictures.npz: pictures (N, 64, 64, 3) uint8; captions (N, 10) int16, style and words as ids of the vocabulary, 0
    before them; styles, names, categories (N,) text; weights (N,) float64, how often each is drawn; held_out (N,) bool.
    """
    if not find_spec("resvg_py"):
        raise ValueError("resvg-py, which draws the pictures, is not installed: python -m pip install resvg-py")
    archives = {style: fetch(package, packages or runs / "packages") for style, (package, _) in PACKAGES.items()}
    noto, flat = archives["noto"], archives["fluent-flat"]
    characters = read(noto, "chars.json") | read(flat, "chars.json")
    category = {name: group for archive in (flat, noto)
                for group, names in read(archive, "metadata.json")["categories"].items() for name in names}
    pictures, styles, names, words = [], [], [], []
    for style, archive in archives.items():
        found = photographs(archive, characters) if style == "fluent-3d" else drawings(archive)
        for name, picture in found:
            caption = [style, *words_of(spelled_out(name, category.get(name, "")))]
            if name in category and len(caption) <= LONGEST:
                pictures.append(picture)
                styles.append(style)
                names.append(name)
                words.append(caption[1:])
    categories = [category[name] for name in names]
    vocabulary = ["", *PACKAGES, *sorted({word for w in words for word in w})]
    ids = {word: i for i, word in enumerate(vocabulary)}
    captions = np.zeros((len(names), LONGEST), np.int16)
    for row, style, w in zip(captions, styles, words):
        row[-len(w) - 1:] = [ids[word] for word in [style, *w]]
    held_out = hold_out(names, words)

    folder = runs / "data"
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"pictures": np.stack(pictures), "captions": captions, "styles": np.array(styles),
              "names": np.array(names), "categories": np.array(categories),
              "weights": sampling_weights_of(categories, words), "held_out": held_out}
    remove_leftovers(folder)
    write_whole(folder / "pictures.npz", lambda file: np.savez(file, **arrays))
    write_json(folder / "vocabulary.json", vocabulary)
    counts = {"pictures": len(names), "held_out": int(held_out.sum()), "names": len(set(names)),
              "words": len(vocabulary) - 1, "styles": Counter(styles), "categories": Counter(categories)}
    held_out_names = sorted({name for name, out in zip(names, held_out) if out})
    write_json(folder / "manifest.json", {"packages": PACKAGES, **counts, "held_out_names": held_out_names})
    for key, value in counts.items():
        click.echo(f"{key}: {value if isinstance(value, int) else dict(value)}")
