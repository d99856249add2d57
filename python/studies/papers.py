"""What the papers say of their own experiments, as far as it could be had, to be read beside ours.

Only abstracts, released repositories and notes by others on the papers were at hand, not the papers' tables; where a
cell is missing here it was not read, and nothing was filled in from memory. Those models (LlamaGen-XL 775M, Anole and
Lumina-mGPT 7B on A100 GPUs) are another world than a 4M model on two processor cores: what can agree is a trend.
"""

LANTERN_TABLE_3 = [  # main results, LlamaGen-XL Stage I; the first ratio of each pair is the abstract's 1.75 and 1.82
    {"T": 0, "method": "EAGLE-2", "speedup": "1.29"}, {"T": 0, "method": "LANTERN, its best", "speedup": "2.26"},
    {"T": 1, "method": "EAGLE-2", "speedup": "0.93"}, {"T": 1, "method": "LANTERN, its best", "speedup": "1.69"},
]

ADT_TABLE_1 = [  # Anole, T = 1, MS-COCO and PartiPrompts
    {"T": 1, "method": "EAGLE-2", "speedup, COCO": "0.76", "speedup, Parti": "0.80", "mean depth": "5.00"},
    {"T": 1, "method": "LANTERN", "speedup, COCO": "1.38", "speedup, Parti": "1.90", "mean depth": ""},
    {"T": 1, "method": "ADT-Tree", "speedup, COCO": "1.06", "speedup, Parti": "1.57", "mean depth": "2.09"},
    {"T": 1, "method": "ADT-Tree + LANTERN", "speedup, COCO": "1.53", "speedup, Parti": "2.20", "mean depth": ""},
]

COOL_TABLE_1 = [
    {"model": model, "method": name, "accept length": length, "latency (s)": latency, "speedup": speedup, "FID": fid,
     "CLIP": clip, "ImageReward": reward}
    for model, name, length, latency, speedup, fid, clip, reward in (
        ("Lumina-mGPT", "target", "1.00", "170.14", "1.00", "28.99", "0.3330", "0.6855"),
        ("Lumina-mGPT", "Eagle-1", "2.76", "71.66", "2.37", "29.05", "0.3330", "0.6883"),
        ("Lumina-mGPT", "LANTERN++", "2.99", "68.64", "2.48", "30.31", "0.3328", "0.6697"),
        ("Lumina-mGPT", "COOL-SD, delta 1.1", "3.11", "63.24", "2.69", "30.30", "0.3325", "0.6699"),
        ("LlamaGen-XL", "Eagle-1", "2.42", "4.99", "2.03", "20.97", "0.3157", "-0.0859"),
        ("LlamaGen-XL", "LANTERN++", "2.67", "4.70", "2.15", "21.17", "0.3157", "-0.1155"),
        ("LlamaGen-XL", "COOL-SD, delta 1.1", "2.73", "4.46", "2.27", "21.02", "0.3167", "-0.0997"),
        ("LlamaGen-XL", "COOL-SD, delta 2", "3.34", "3.72", "2.72", "21.20", "0.3154", "-0.1353"))
]

CSPD_TABLE_1 = {4: "1.62", 8: "1.96", 16: "2.20", 32: "2.33"}  # gamma: speedup of MAR-H with MAR-B, batch 256
