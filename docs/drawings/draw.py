"""The drawings of docs/ops.md and docs/design.md:   python docs/drawings/draw.py

Plain SVG, written line by line. Each drawing has a light panel of its own, so that it can be read on a light and on a
dark page. Numbers in the drawings are worked out here by the rules of the ops, on examples small enough to follow.
"""
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
INK, GRAY, LINE, PANEL = "#1f2328", "#6b7178", "#c9ccd1", "#fcfcfa"
TARGET, DRAFT, YES, NO = "#3465a4", "#d9822b", "#2e8b57", "#c23b3b"
PALE = {TARGET: "#dce7f5", DRAFT: "#fbe8d2", YES: "#d7efdf", NO: "#f7dad8", GRAY: "#ebecee"}


class Drawing:
    """An SVG of this size; every method adds one shape."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f'<defs>{"".join(self.arrowhead(color) for color in (INK, GRAY, TARGET, DRAFT, YES, NO))}</defs>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{PANEL}" stroke="{LINE}"/>']

    @staticmethod
    def arrowhead(color: str) -> str:
        return (f'<marker id="to{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{color}"/></marker>')

    def text(self, x, y, text, size=13, color=INK, anchor="middle", bold=False, mono=False):
        extra = ' font-weight="bold"' * bold + ' font-family="DejaVu Sans Mono, Consolas, monospace"' * mono
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{extra}>'
                          f"{escape(text)}</text>")

    def line(self, x1, y1, x2, y2, color=GRAY, width=1.5, arrow=False, dash=""):
        extra = f' marker-end="url(#to{color[1:]})"' * arrow + f' stroke-dasharray="{dash}"' * bool(dash)
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
                          f'stroke-width="{width}"{extra}/>')

    def box(self, x, y, width, height, fill="none", stroke=GRAY, rx=3, thick=1.2, dash=""):
        extra = f' stroke-dasharray="{dash}"' * bool(dash)
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx}" fill="{fill}" '
                          f'stroke="{stroke}" stroke-width="{thick}"{extra}/>')

    def circle(self, x, y, r, fill=PANEL, stroke=GRAY, thick=1.5, dash=""):
        extra = f' stroke-dasharray="{dash}"' * bool(dash)
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" fill="{fill}" stroke="{stroke}" '
                          f'stroke-width="{thick}"{extra}/>')

    def curve(self, points, color, width=2.0):
        self.parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" '
                          f'stroke="{color}" stroke-width="{width}"/>')

    def node(self, x, y, label, color=GRAY, r=17, dash=""):
        self.circle(x, y, r, PALE.get(color, PANEL), color, 2, dash)
        self.text(x, y + 4.5, label, 13, INK, bold=True)

    def edge(self, a, b, color=GRAY, width=1.6, r=17, dash=""):
        (x1, y1), (x2, y2) = a, b
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        self.line(x1 + ux * r, y1 + uy * r, x2 - ux * (r + 1), y2 - uy * (r + 1), color, width, True, dash)

    def bars(self, x, base, values, height, color, width=15, gap=4, labels=None, marks=None):
        """values in [0, 1], drawn upwards from y = base; marks: index -> color of its outline."""
        for i, value in enumerate(values):
            left = x + i * (width + gap)
            stroke = (marks or {}).get(i, color)
            self.box(left, base - value * height, width, value * height, PALE[color], stroke, 1,
                     2.2 if i in (marks or {}) else 1)
            if labels:
                self.text(left + width / 2, base + 13, labels[i], 10, GRAY)
        self.line(x - 3, base, x + len(values) * (width + gap), base, GRAY, 1)

    def save(self, name: str):
        (HERE / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>"]) + "\n")


PARENTS = [-1, 0, 0, 1, 1, 2]
PLACES = [(130, 62), (75, 132), (185, 132), (40, 202), (110, 202), (185, 202)]


def tree():
    """tree_links and tree_mask of one tree."""
    d = Drawing(760, 290, "tree_links and tree_mask")
    d.text(130, 28, "the tree", 14, bold=True)
    for n, parent in enumerate(PARENTS):
        if n:
            d.edge(PLACES[parent], PLACES[n])
    for n, place in enumerate(PLACES):
        d.node(*place, str(n), TARGET if n == 0 else DRAFT)
    d.text(150, 52, "root: the newest token", 11, GRAY, "start")
    d.text(112, 245, "parents precede their children", 11, GRAY)

    depth = [0, 1, 1, 2, 2, 2]
    first_child = [1, 3, 5, -1, -1, -1]
    next_sibling = [-1, 2, -1, 4, -1, -1]
    d.text(395, 28, "tree_links(parents)", 14, bold=True)
    rows = [("node", range(6)), ("parents", PARENTS), ("depth", depth), ("first_child", first_child),
            ("next_sibling", next_sibling)]
    for r, (name, values) in enumerate(rows):
        y = 62 + r * 36
        d.text(372, y, name, 12, GRAY if r == 0 else INK, "end", mono=True)
        for n, value in enumerate(values):
            x = 384 + n * 24
            if r:
                d.box(x, y - 16, 24, 24, PALE[TARGET] if r == 1 else PANEL, LINE)
            d.text(x + 12, y + 1, str(value), 12, GRAY if r == 0 else INK)
    d.text(395, 258, "-1: none; parents are the input", 11, GRAY)

    d.text(650, 28, "tree_mask(ancestors)", 14, bold=True)
    for n in range(6):
        seen, at = set(), n
        while at >= 0:
            seen.add(at)
            at = PARENTS[at]
        d.text(570, 81 + n * 26, str(n), 12, GRAY)
        d.text(593 + n * 26, 56, str(n), 12, GRAY)
        for m in range(6):
            d.box(580 + m * 26, 64 + n * 26, 26, 26, TARGET if m in seen else PANEL, LINE, 0)
    d.text(650, 242, "row: a node; blue: the nodes that it", 11, GRAY)
    d.text(650, 258, "attends to, its ancestors and itself", 11, GRAY)
    d.save("tree")


def verify():
    """The walk of verify_tree over one tree."""
    d = Drawing(760, 400, "verify_tree: draft tree, rejected and accepted children, residual, next token")
    d.text(20, 30, "verify_tree walks from the root and accepts one path", 14, anchor="start", bold=True)
    places = [(110, 80), (55, 180), (165, 180), (125, 280), (205, 280)]
    for a, b, color in ((0, 1, NO), (0, 2, YES), (2, 3, NO), (2, 4, NO)):
        d.edge(places[a], places[b], color, 2.4 if color == YES else 1.6, dash="" if color == YES else "5 4")
    for n, color in enumerate((TARGET, NO, YES, NO, NO)):
        d.node(*places[n], "root" if n == 0 else "abcd"[n - 1], color)
    d.text(22, 215, "1. rejected", 12, NO, "start")
    d.text(190, 176, "2. accepted", 12, YES, "start")
    d.text(70, 316, "3. rejected", 12, NO, "start")
    d.text(186, 316, "4. rejected", 12, NO, "start")
    d.edge(places[2], (165, 350), TARGET, 2)
    d.text(165, 366, "5. next token, drawn from R", 12, TARGET)

    names = "abcdef"
    P = [0.10, 0.30, 0.15, 0.20, 0.05, 0.20]
    Q = [0.45, 0.25, 0.10, 0.10, 0.05, 0.05]
    rest = [max(p - q, 0) for p, q in zip(P, Q)]
    R = [r / sum(rest) for r in rest]
    Q2 = [0 if i == 0 else q / (1 - Q[0]) for i, q in enumerate(Q)]
    x, marks = 330, {0: NO}
    d.text(x, 62, "At the root: R is the target's row P. The draft's row is Q.", 12, anchor="start")
    d.bars(x, 150, P, 150, TARGET, labels=names, marks=marks)
    d.bars(x + 150, 150, Q, 150, DRAFT, labels=names, marks=marks)
    d.text(x + 50, 180, "R = P", 12, TARGET)
    d.text(x + 200, 180, "Q", 12, DRAFT)
    d.text(x + 290, 104, "child a is accepted", 12, anchor="start")
    d.text(x + 290, 121, "if u Q(a) < R(a),", 12, anchor="start")
    d.text(x + 290, 138, "here with chance", 12, anchor="start")
    d.text(x + 290, 155, f"{P[0]:.2f} / {Q[0]:.2f} = {P[0] / Q[0]:.2f}", 12, anchor="start")
    d.text(x, 212, "After a rejection R is the residual, what Q left of it. Q loses a.", 12, anchor="start")
    d.bars(x, 320, R, 150, TARGET, labels=names, marks={1: YES})
    d.bars(x + 150, 320, Q2, 150, DRAFT, labels=names, marks={1: YES})
    d.text(x + 50, 350, "R = norm(max(P - Q, 0))", 12, TARGET)
    d.text(x + 215, 350, "Q without a", 12, DRAFT)
    d.text(x + 290, 274, "child b is accepted", 12, anchor="start")
    d.text(x + 290, 291, "with chance", 12, anchor="start")
    d.text(x + 290, 308, f"{R[1]:.2f} / {Q2[1]:.2f} = {R[1] / Q2[1]:.2f}", 12, anchor="start")
    d.text(x, 384, "So every emitted token is distributed as the target's own.", 12, GRAY, "start")
    d.save("verify")


def neighborhood():
    """neighborhood_sum with the cutoff tvd."""
    d = Drawing(760, 300, "neighborhood_sum with a cutoff")
    d.text(24, 30, "codes near the draft x", 14, anchor="start", bold=True)
    points = {1: (168, 138), 2: (112, 118), 3: (135, 212), 4: (215, 190), 5: (64, 206)}
    d.circle(140, 158, 66, "#eef6f1", YES, 1.2, "4 3")
    for x, y in ((40, 80), (250, 90), (262, 230), (36, 250), (215, 70), (60, 130), (190, 255)):
        d.circle(x, y, 4, PALE[GRAY], GRAY, 1)
    for j, (x, y) in points.items():
        color = YES if j <= 3 else GRAY
        d.circle(x, y, 11, PALE[color], color)
        d.text(x, y + 4, str(j), 11)
    d.node(140, 158, "x", DRAFT, 14)
    d.text(150, 285, "1 to k: its neighbors, nearest first", 11, GRAY)

    own, values, delta = 0.08, [0.06, 0.0, 0.09, 0.12, 0.05], 0.20
    x, base, scale = 340, 230, 480
    d.text(x - 10, 30, 'S adds up the neighbors while S <= delta (cutoff "tvd")', 13, anchor="start", bold=True)
    total = 0.0
    for j, value in enumerate(values, 1):
        left, top = x + (j - 1) * 54, base - (total + value) * scale
        color = YES if total + value <= delta and j <= 3 else NO if j == 4 else GRAY
        if j <= 4:
            d.box(left, base - total * scale, 40, total * scale, PALE[GRAY], LINE, 0)
            d.box(left, top, 40, max(value * scale, 1), PALE[color], color, 0, 1.6)
            d.text(left + 20, top - 6, f"S = {total + value:.2f}", 10, INK)
        else:
            d.text(left + 20, base - 8, "not looked at", 9, GRAY)
        d.text(left + 20, base + 16, f"{j}: {value:.2f}", 11, color if j <= 4 else GRAY)
        if j <= 3:
            total += value
    d.line(x - 12, base, x + 275, base, INK, 1.2)
    d.line(x - 12, base - delta * scale, x + 275, base - delta * scale, NO, 1.5, dash="6 4")
    d.text(x + 280, base - delta * scale + 4, f"delta = {delta:.2f}", 12, NO, "start")
    sums = f"{own:.2f} + {total:.2f} = {own + total:.2f}"
    d.text(x - 10, 268, f"relaxed_mass = P(x) + S = {sums},   num_neighbors = 3", 12, anchor="start")
    d.text(x - 10, 287, "Neighbor 4 does not fit: the list ends there. Neighbor 2 adds no mass.", 10.5,
           GRAY, "start")
    d.save("neighborhood")


def dynamic():
    """expand_tree level by level, then select_tree."""
    d = Drawing(760, 330, "expand_tree builds levels, select_tree keeps the best nodes")
    d.text(20, 30, "expand_tree: width 2, two levels", 14, anchor="start", bold=True)
    root, level1 = (210, 70), [(110, 150), (310, 150)]
    level2 = [(60, 240), (160, 240), (260, 240), (360, 240)]
    scores1, p2 = [0.6, 0.3], [0.5, 0.4, 0.7, 0.2]
    scores2 = [scores1[i // 2] * p for i, p in enumerate(p2)]
    ranked = sorted([*scores1, *scores2], reverse=True)
    kept = set(ranked[:4])
    for i, place in enumerate(level1):
        d.edge(root, place, INK if scores1[i] in kept else GRAY)
    for i, place in enumerate(level2):
        d.edge(level1[i // 2], place, INK if scores2[i] in kept else GRAY,
               dash="" if scores2[i] in kept else "5 4")
    d.node(*root, "0", TARGET)
    for i, (x, y) in enumerate(level1):
        d.node(x, y, "ab"[i], DRAFT)
        d.text(x + (-24 if i == 0 else 24), y - 2, f"{scores1[i]:.2f}", 12, INK, "end" if i == 0 else "start")
    for i, (x, y) in enumerate(level2):
        d.node(x, y, "cdef"[i], DRAFT if scores2[i] in kept else GRAY, dash="" if scores2[i] in kept else "4 3")
        d.text(x, y + 34, f"{scores1[i // 2]:.1f} x {p2[i]:.1f}", 10, GRAY)
        d.text(x, y + 49, f"= {scores2[i]:.2f}", 12)
    d.text(20, 318, "score: product of the draft's probabilities on the path", 11,
           GRAY, "start")
    d.text(470, 30, "select_tree: size 5", 14, anchor="start", bold=True)
    d.text(470, 54, "the root and the 4 best of all candidates", 12, GRAY, "start")
    root, one, two = (590, 92), [(530, 162), (650, 162)], [(490, 240), (570, 240), (650, 240)]
    best = [i for i in range(4) if scores2[i] in kept]
    for place in one:
        d.edge(root, place, INK)
    slots = {0: two[0], 1: two[1], 2: two[2], 3: (720, 240)}
    for i in best:
        d.edge(one[i // 2], slots[i], INK)
    d.node(*root, "0", TARGET)
    for number, (place, letter) in enumerate([*zip(one, "ab"), *((slots[i], "cdef"[i]) for i in best)], 1):
        d.node(*place, str(number), YES)
        d.text(place[0] + 22, place[1] + 5, letter, 12, GRAY, "start")
    d.text(470, 290, "Kept nodes are numbered in the order of", 11, GRAY, "start")
    d.text(470, 305, "the candidates, so parents come first.", 11, GRAY, "start")
    d.save("dynamic")


def children():
    """draw_children: without replacement."""
    d = Drawing(760, 200, "draw_children draws without replacement")
    d.text(20, 30, "draw_children: each child is drawn from what the earlier ones left of the draft's row", 14,
           anchor="start", bold=True)
    Q, taken = [0.35, 0.25, 0.15, 0.15, 0.10], []
    for k, token in enumerate((1, 0, 3)):
        x = 40 + k * 245
        left = [0 if i in taken else q for i, q in enumerate(Q)]
        total = sum(left)
        d.bars(x, 150, [q / total for q in left], 150, DRAFT, 22, 5, "abcde", {token: YES})
        d.text(x + 65, 183, f"child {k + 1} is {'abcde'[token]}", 12, YES)
        if k < 2:
            d.line(x + 150, 110, x + 215, 110, GRAY, 1.5, True)
            d.text(x + 182, 98, f"remove {'abcde'[token]}", 11, GRAY)
        taken.append(token)
    d.save("children")


def guided():
    """guided_probs: four steps."""
    import math
    d = Drawing(760, 220, "guided_probs: guidance, temperature, top-k, top-p, softmax")
    cond = [2.0, 1.0, 1.6, 0.2, 0.8, -0.5]
    uncond = [1.0, 1.2, 0.6, 0.4, 0.0, 0.0]
    s, T = 2.0, 0.8
    x = [u + s * (c - u) for c, u in zip(cond, uncond)]

    def softmax(values):
        e = [math.exp(v - max(values)) if v > -math.inf else 0 for v in values]
        return [v / sum(e) for v in e]

    tempered = [v / T for v in x]
    cut = sorted(tempered, reverse=True)[3]
    top_k = [v if v >= cut else -math.inf for v in tempered]
    p, mass, nucleus = softmax(top_k), 0.0, []
    for i in sorted(range(6), key=lambda i: -p[i]):
        if mass < 0.9:
            nucleus.append(i)
        mass += p[i]
    top_p = [v if i in nucleus else -math.inf for i, v in enumerate(top_k)]
    stages = [("with condition", softmax(cond)), ("guidance 2", softmax(x)), ("temperature 0.8", softmax(tempered)),
              ("top-k 4", softmax(top_k)), ("top-p 0.9", softmax(top_p))]
    d.text(20, 30, "guided_probs: the same six tokens after each step, as probabilities", 14, anchor="start", bold=True)
    for i, (name, values) in enumerate(stages):
        left = 28 + i * 148
        d.bars(left, 180, values, 190 / max(0.85, max(values)) * 0.7, TARGET, 13, 3, "abcdef")
        d.text(left + 46, 208, name, 12)
        if i:
            d.line(left - 42, 120, left - 14, 120, GRAY, 1.5, True)
    d.save("guided")


def gaussian():
    """accept_gaussian and resample_gaussian: a chain and one density ratio."""
    import math
    d = Drawing(760, 330, "accept_gaussian and resample_gaussian")
    d.text(20, 30, "a chain of four drafts, with truncate", 14, anchor="start", bold=True)
    states = [("accepted", YES, "is_accepted"), ("accepted", YES, "is_accepted"), ("rejected", NO, "is_rejected"),
              ("discarded", GRAY, "neither")]
    for i, (name, color, flag) in enumerate(states):
        x = 24 + i * 92
        d.box(x, 56, 74, 56, PALE[color], color, 5, 2, "5 4" if color == GRAY else "")
        d.text(x + 37, 80, f"x{i + 1}", 15, bold=True)
        d.text(x + 37, 100, name, 11)
        d.text(x + 37, 130, flag, 10, GRAY, mono=True)
        if i < 3:
            d.line(x + 76, 84, x + 90, 84, GRAY, 1.5, True)
    d.text(24, 160, "num_accepted = 2", 12, anchor="start", mono=True)
    d.text(24, 190, "resample_gaussian replaces the rejected one:", 12, anchor="start")
    for i, (name, color) in enumerate((("try 1", NO), ("try 2", NO), ("try 3", YES))):
        x = 24 + i * 92
        d.box(x, 206, 74, 34, PALE[color], color, 5, 1.6)
        d.text(x + 37, 228, name, 12)
        if i < 2:
            d.line(x + 76, 223, x + 90, 223, GRAY, 1.5, True)
    d.text(24, 264, "The first try that is kept is the token. If none of", 11, GRAY, "start")
    d.text(24, 280, "them is, the fallback is, a sample of the target.", 11, GRAY, "start")

    x0, base, width, height = 430, 250, 300, 170
    d.text(x0 - 10, 30, "the density ratio r = p(x) / q(x)", 14, anchor="start", bold=True)

    def density(t, mean, sigma):
        return math.exp(-((t - mean) / sigma) ** 2 / 2) / sigma

    grid = [i / 60 * 6 - 3 for i in range(61)]
    for mean, sigma, color, name in ((0.5, 0.8, TARGET, "target p"), (-0.5, 0.9, DRAFT, "draft q")):
        d.curve([(x0 + (t + 3) / 6 * width, base - density(t, mean, sigma) / 1.3 * height) for t in grid], color)
        d.text(x0 + (mean + 3) / 6 * width + (44 if color == TARGET else -44),
               base - density(mean, mean, sigma) / 1.3 * height - 4, name, 12, color)
    d.line(x0, base, x0 + width, base, INK, 1)
    for t, color, name in ((0.95, YES, "p > q: always"), (-0.9, NO, "p < q: with chance p/q")):
        x = x0 + (t + 3) / 6 * width
        d.line(x, base, x, base - 150, color, 1.5, dash="4 3")
        d.text(x, base + 18, "x", 12, color)
        d.text(x + (4 if t > 0 else -6), base + 36, name, 11, color, "start" if t > 0 else "middle")
    d.text(x0 - 10, 308, "A draft is accepted iff u < exp(log r).", 12, anchor="start")
    d.save("gaussian")


def residual():
    """The three residuals of verify_tree at one rejected draft."""
    d = Drawing(760, 240, "the residuals optimal, relaxed and released")
    d.text(20, 30, "what a rejected point mass x = a leaves of R; b and c are its admitted neighbors", 14,
           anchor="start", bold=True)
    R = [0.15, 0.10, 0.05, 0.30, 0.20, 0.20]

    def normal(row):
        return [v / sum(row) for v in row]

    columns = [("R", "before", R), ("optimal", "a is removed", normal([0, *R[1:]])),
               ("relaxed", "a, b and c are removed", normal([0, 0, 0, *R[3:]])),
               ("released", "k + 1 neighbors are removed", normal([0, 0, 0, 0, *R[4:]]))]
    for i, (name, what, row) in enumerate(columns):
        x = 30 + i * 183
        d.bars(x, 175, row, 200, TARGET, 17, 4, "abcdef", {0: DRAFT, 1: YES, 2: YES} if i == 0 else None)
        d.text(x + 62, 207, name, 13, bold=True)
        d.text(x + 62, 224, what, 10.5, GRAY)
    d.save("residual")


def steps():
    """The five verbs of a decoding step."""
    d = Drawing(760, 170, "a decoding step: draft, target forward, verify, commit, update")
    verbs = [("draft", DRAFT, "a tree, by the", "draft model"),
             ("target forward", TARGET, "all its nodes", "in one forward"),
             ("verify", YES, "accept a path, draw", "the token after it"),
             ("commit", INK, "tokens and cache of", "the accepted nodes"),
             ("update", INK, "the draft model and", "the tree's shape")]
    for i, (name, color, one, two) in enumerate(verbs):
        x = 14 + i * 149
        d.box(x, 34, 134, 76, PALE.get(color, PANEL), color, 6, 1.8)
        d.text(x + 67, 58, name, 14, bold=True)
        d.text(x + 67, 80, one, 11, GRAY)
        d.text(x + 67, 96, two, 11, GRAY)
        if i < 4:
            d.line(x + 135, 72, x + 148, 72, GRAY, 1.8, True)
    d.line(677, 112, 677, 138, GRAY, 1.5)
    d.line(677, 138, 81, 138, GRAY, 1.5)
    d.line(81, 138, 81, 113, GRAY, 1.5, True)
    d.text(380, 157, "until every picture of the batch is complete", 12, GRAY)
    d.save("steps")


def layers():
    """Which package may import which."""
    d = Drawing(760, 250, "packages and their imports")
    rows = [["cli"], ["studies", "train"], ["pipelines"], ["decoding"], ["models"]]
    d.box(20, 16, 350, 218, "none", LINE, 8, 1.5, "6 4")
    d.text(195, 36, "specvis, the program (python/specvis)", 12, GRAY)
    for r, names in enumerate(rows):
        y = 50 + r * 36
        for i, name in enumerate(names):
            width = 150 if len(names) == 2 else 310
            d.box(40 + i * 160, y, width, 26, PALE[DRAFT], DRAFT)
            d.text(40 + i * 160 + width / 2, y + 18, name, 13)
    d.box(410, 16, 330, 218, "none", LINE, 8, 1.5, "6 4")
    d.text(575, 36, "specvis_kernels, the ops", 12, GRAY)
    for y, name, what in ((56, "op.py", "checks, schema, oracle"), (112, "triton/op.py", "Triton kernel"),
                          (168, "csrc/cpu/op.cpp, csrc/cuda/op.cu", "C++ and CUDA kernels")):
        d.box(430, y, 290, 44, PALE[TARGET], TARGET)
        d.text(575, y + 19, name, 13, mono=True)
        d.text(575, y + 36, what, 11, GRAY)
    d.line(372, 134, 408, 134, INK, 2, True)
    d.save("layers")


if __name__ == "__main__":
    for drawing in (tree, verify, neighborhood, dynamic, children, guided, gaussian, residual, steps, layers):
        drawing()
