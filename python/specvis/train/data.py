"""The pictures: freely licensed emoji sets from their npm packages, rendered at 64 pixels on white."""
import io
import json
import re
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import click
import numpy as np
from PIL import Image
from tqdm import tqdm

SIZE = 64
LONGEST = 10  # words of a caption, the style included
PACKAGES = {  # style: npm package, licence of the pictures
    "fluent-3d": ("@lobehub/fluent-emoji-3d@1.1.0", "MIT"),
    "fluent-flat": ("@iconify-json/fluent-emoji-flat@1.2.6", "MIT"),
    "noto": ("@iconify-json/noto@1.2.9", "Apache-2.0"),
}
PEOPLE_SHARE = 0.25   # of the draws; 57 % of the pictures are people, mostly in five skin tones
HELD_OUT_NAMES = 150
TONES = ("medium-light", "medium-dark", "light", "medium", "dark")  # the longer phrases first


def words_of(name: str) -> list[str]:
    """"waving-hand-dark-skin-tone" -> ["waving", "hand", "skin-dark"]: a skin tone is one word."""
    words = []
    for part in re.split(f"((?:{'|'.join(TONES)})-skin-tone)", name):
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
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return tarfile.open(archive)


def on_white(image: Image.Image) -> np.ndarray:
    image = image.convert("RGBA")
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return np.asarray(square.convert("RGB").resize((SIZE, SIZE), Image.LANCZOS))


def read(archive: tarfile.TarFile, name: str):
    return json.load(archive.extractfile(f"package/{name}"))


def drawings(archive: tarfile.TarFile):
    """(name, picture) of an Iconify set; hidden icons, aliases and extras are left out."""
    import resvg_py  # only this stage needs it

    icons, info = read(archive, "icons.json"), read(archive, "metadata.json")
    extras = {name for group, names in info.get("categories", {}).items() if group.startswith("Extras") for name in names}
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
    def plain(code):
        return re.sub("-?fe0f", "", code)

    names = {plain(code): name for code, name in characters.items()}
    files = sorted((m for m in archive.getmembers() if m.name.endswith(".webp")), key=lambda m: m.name)
    for member in tqdm(files, desc="fluent-emoji-3d"):
        name = names.get(plain(Path(member.name).stem))
        if name is not None:
            yield name, on_white(Image.open(archive.extractfile(member)))


def draw_weights(categories: list[str]) -> np.ndarray:
    """How often each picture is drawn: people together get PEOPLE_SHARE, other categories the square root of their size."""
    sizes = Counter(categories)
    people = "People & Body"
    roots = {c: n ** 0.5 for c, n in sizes.items() if c != people}
    share = {c: (1 - PEOPLE_SHARE) * root / sum(roots.values()) for c, root in roots.items()} | {people: PEOPLE_SHARE}
    return np.array([share[c] / sizes[c] for c in categories]) * len(categories)


@click.command()
@click.option("--runs", type=click.Path(path_type=Path), default="runs", show_default=True,
              help="Folder of the training stages.")
@click.option("--packages", type=click.Path(path_type=Path),
              help="Folder with the packages' archives; missing ones are fetched into it. [default: RUNS/packages]")
def data(runs, packages):
    """Fetch and render the pictures; writes runs/data/pictures.npz, vocabulary.json and manifest.json."""
    archives = {style: fetch(package, packages or runs / "packages") for style, (package, _) in PACKAGES.items()}
    noto, flat = archives["noto"], archives["fluent-flat"]
    characters = read(noto, "chars.json") | read(flat, "chars.json")
    category = {name: group for archive in (flat, noto)
                for group, names in read(archive, "metadata.json")["categories"].items() for name in names}
    pictures, styles, names = [], [], []
    for style, archive in archives.items():
        found = photographs(archive, characters) if style == "fluent-3d" else drawings(archive)
        for name, picture in found:
            if name in category and len(words_of(name)) < LONGEST:
                pictures.append(picture)
                styles.append(style)
                names.append(name)
    categories = [category[name] for name in names]
    every = sorted(set(names))
    held_out = set(np.random.default_rng(0).choice(every, HELD_OUT_NAMES, replace=False))
    known = {word for name in names if name not in held_out for word in words_of(name)}
    held_out = {name for name in held_out if known.issuperset(words_of(name))}  # a word must have been seen once
    vocabulary = ["", *PACKAGES, *sorted({word for name in names for word in words_of(name)})]
    ids = {word: i for i, word in enumerate(vocabulary)}
    captions = np.zeros((len(names), LONGEST), np.int16)
    for row, style, name in zip(captions, styles, names):
        words = [ids[word] for word in [style, *words_of(name)]]
        row[-len(words):] = words
    folder = runs / "data"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "pictures.npz", pictures=np.stack(pictures), captions=captions, styles=np.array(styles),
             names=np.array(names), categories=np.array(categories), weights=draw_weights(categories),
             held_out=np.array([name in held_out for name in names]))
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    manifest = {"packages": PACKAGES, "pictures": len(names), "names": len(every), "words": len(vocabulary) - 1,
                "held_out_names": sorted(held_out), "styles": Counter(styles), "categories": Counter(categories)}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    click.echo(", ".join(f"{key} {value}" for key, value in manifest.items() if key not in ("packages", "held_out_names")))
