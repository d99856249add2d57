"""The training stages: each runs on what the one before made, and an interrupted run ends as an unbroken one."""
import dataclasses
import functools
import json
import math
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributions import Normal, kl_divergence

from specvis.models.diffloss import DiffLoss, Schedule
from specvis.pipelines.discrete import SHIPPED, Pipeline
from specvis.pipelines.mar import Scaling
from tests.cli import conftest
from tests.test_files import full_disk
from training.data import hold_out, spelled_out, words_of
from training.gpt import Tokens, captioned, grow
from training.main import main
from training.mar import attend, diffusion_loss
from training.run import TrainingRun

run = functools.partial(conftest.run, group=main)


def pictures(folder, count=24):
    """Random blots in the form that the data stage writes."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    blots = np.full((count, 64, 64, 3), 255, np.uint8)
    blots[:, 16:48, 16:48] = generator.integers(0, 255, (count, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    captions = np.zeros((count, 10), np.int16)
    captions[:, -2:] = generator.integers(1, 4, (count, 2))
    np.savez(folder / "pictures.npz", pictures=blots, captions=captions, weights=np.ones(count),
             held_out=np.arange(count) % 4 == 0,
             **{name: np.array(["a"] * count) for name in ("styles", "names", "categories")})
    (folder / "vocabulary.json").write_text(json.dumps(["", "fluent-3d", "red", "heart"]))


def a_gpt(folder, layers, dim=32):
    """A small GPT with random outputs of its layers, and its files in a folder."""
    torch.manual_seed(layers)
    tokens = SimpleNamespace(codebook=torch.zeros(64, 8), vocabulary=["", "red", "heart"])
    model = captioned(tokens, dim, layers, heads=2, dropout=0.0, caption_dim=dim).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    folder.mkdir()
    for part in ("gpt", "words"):
        save_file({name: value.contiguous() for name, value in getattr(model, part).state_dict().items()},
                  folder / f"{part}.safetensors")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.gpt.config)))
    return model


def test_training_reads_as_the_model_does_and_a_deeper_gpt_begins_as_the_shallow_one(tmp_path):
    shallow, deep = a_gpt(tmp_path / "shallow", 2), a_gpt(tmp_path / "deep", 5)
    captions, ids = torch.randint(1, 3, (2, 32)), torch.randint(64, (2, 256))
    wanted, hidden = shallow.logits(captions, ids), shallow.gpt.teacher_forced(*shallow.condition(captions), ids)
    assert torch.allclose(wanted, shallow.gpt.logits(hidden[:, 31:]), atol=1e-4)
    assert torch.allclose(shallow.hidden(*shallow.condition(captions), ids), hidden, atol=1e-4)
    assert not torch.allclose(deep.logits(captions, ids), wanted, atol=1)
    grow(deep, tmp_path / "shallow")
    assert torch.allclose(deep.logits(captions, ids), wanted, atol=1e-4)
    deep.requires_grad_(True).logits(captions, ids).square().mean().backward()
    assert all(block.attention.wo.weight.grad.abs().max() > 0 for block in deep.gpt.layers)
    for name, layers, dim, message in (("shallower", 1, 32, r"layers must be at least 2, as in .*, got 1"),
                                       ("wider", 2, 64, r"dim must be 32, as in .*, got 64")):
        with pytest.raises(ValueError, match=message):
            grow(a_gpt(tmp_path / name, layers, dim), tmp_path / "shallow")


def test_a_near_code_is_nearly_as_good(tmp_path):
    """The loss is the cross entropy with the chances by which the codes that are read are drawn."""
    codebook = F.normalize(torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    (tmp_path / "tokenizer").mkdir(), (tmp_path / "data").mkdir()
    save_file({"quantize.embedding.weight": codebook}, tmp_path / "tokenizer" / "tokenizer.safetensors")
    (tmp_path / "data" / "vocabulary.json").write_text('["", "red"]')
    np.savez(tmp_path / "tokens.npz", tokens=np.full((40, 256), 7), condition=np.ones((40, 10), int),
             held_out=np.arange(40) < 2, weight=np.ones(40))
    tokens = Tokens(tmp_path, torch.device("cpu"))
    captions, ids, null, original = tokens.draw(400, torch.Generator().manual_seed(0))
    assert captions.shape == (400, 32) and null.float().mean().item() == pytest.approx(0.1, abs=0.05)
    assert (original == 7).all() and set(ids.unique().tolist()) <= set(tokens.near[7].tolist())
    share = torch.bincount(ids.flatten(), minlength=4096) / ids.numel()
    assert torch.allclose(share[tokens.near[7]], tokens.chances[7], atol=0.01)
    logits = torch.randn(2, 256, 4096)
    wanted = F.cross_entropy(logits.flatten(0, 1), torch.zeros(4096).index_add_(
        0, tokens.near[7], tokens.chances[7]).expand(512, -1))
    assert tokens.cross_entropy(logits, original[:2]).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("arguments, message", [
    (["tokenizer", "--steps", "1"], "pictures.npz is missing: run `python -m training data`"),
    (["gpt", "--steps", "1"], "tokens.npz is missing: run `python -m training tokenizer`"),
    (["mar", "--steps", "1"], "pictures.npz is missing: run `python -m training data`"),
    (["mar-draft", "--steps", "1"], "pictures.npz is missing: run `python -m training data`"),
    (["export"], "eagle.safetensors is missing: run `python -m training eagle`"),
    (["export", "--only", "mar"], "mar.safetensors is missing: run `python -m training mar`"),
    (["gpt", "--minutes", "nan"], "'--minutes': it must be finite, got nan"),
    (["gpt", "--lr", "inf"], "'--lr': it must be finite, got inf"),
    (["paint"], "No such command 'paint'"),
])
def test_what_is_missing_is_named(tmp_path, arguments, message):
    result = run(*arguments, *(["--runs", tmp_path] if arguments != ["paint"] else []), status=2)
    assert message in result.output


@pytest.mark.parametrize("broken_at", [3, 8])
def test_an_interrupted_run_ends_as_an_unbroken_one(tmp_path, broken_at):
    def train(folder, until):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        trained = TrainingRun(folder, model, lr=0.1, weight_decay=0.1, minutes=None, steps=9)
        for step in trained:
            if step == until:
                break
            trained.descend(model(torch.rand(8, 4, generator=trained.generator(step))).square().mean())
            trained.log(loss=step)
            if step + 1 == until:
                trained.step += 1          # as the loop would count it before saving
                trained.save()
                trained.step -= 1
        log = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
        return model.weight, trained.average[0], log

    *whole, whole_log = train(tmp_path / "whole", None)
    train(tmp_path / "broken", broken_at)
    *again, log = train(tmp_path / "broken", None)
    assert all(map(torch.equal, whole, again)) and log == whole_log == list(range(9))


def rates(trained, stop=None):
    """The learning rate of each step that is still to do."""
    found = []
    for step in trained:
        if step == stop:
            break
        found.append(round(trained.lr, 6))
    return found


def test_the_rate_is_constant_and_then_falls(tmp_path):
    constant, falling = [0.1] * 8, [0.1, 0.05]
    assert rates(a_run(tmp_path / "once", 10)) == constant + falling
    assert rates(a_run(tmp_path / "once", 10)) == []
    with pytest.raises(ValueError, match=r"steps must be more than 8, which .*once has had already, got 8"):
        a_run(tmp_path / "once", 8)
    assert rates(a_run(tmp_path / "once", 20)) == [0.1] * 8 + [0.1, 0.075, 0.05, 0.025]  # from step 8
    assert rates(a_run(tmp_path / "once", 17)) == [0.1]                                   # from step 16, at once
    assert rates(a_run(tmp_path / "endless", None), stop=30) == [0.1] * 30


def interrupted(run, at):
    """The steps of a run that Ctrl-C ends in this one."""
    steps, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for step in run:
            if step == at:
                os.kill(os.getpid(), signal.SIGINT)
            steps.append(step)
    assert signal.getsignal(signal.SIGINT) is before
    return steps


def test_a_run_without_an_end_goes_on_and_can_be_ended(tmp_path, capsys):
    assert interrupted(a_run(tmp_path, None), at=6) == [*range(7)]
    said = " ".join(capsys.readouterr().err.split())
    assert "ending after this step" in said and "the same command goes on from here" in said
    assert "To end the run, give more than its 0.0 minutes as --minutes, or more than its 7 steps as --steps" in said
    assert a_run(tmp_path, None).step == 7
    assert rates(a_run(tmp_path, 10)) == [0.1, 0.1, 0.05]


def test_the_time_of_a_pause_does_not_count(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("training.run.time.monotonic", lambda: next(clock))
    run = a_run(tmp_path, 3)
    for step in run:
        if step == 1:
            next(clock), next(clock)  # the process is stopped, and goes on
            os.kill(os.getpid(), signal.SIGCONT)
    assert run.seconds == 30


def test_the_average_follows(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    run, weights, wanted = a_run(tmp_path, 50, model=model), [], model.weight.item()
    for step in run:
        run.descend(model(torch.ones(1, 1)).square().sum())
        weights.append(model.weight.item())
        wanted += max(0.001, 9 / (10 + step)) * (weights[-1] - wanted)
    with run.averaged():
        assert model.weight.item() == pytest.approx(wanted, rel=1e-5) != weights[-1] and not model.training
    assert model.weight.item() == weights[-1] and model.training


def a_run(folder, steps, width=1, model=None, **configuration):
    return TrainingRun(folder, model or nn.Linear(width, width), lr=0.1, weight_decay=0, minutes=None, steps=steps,
                       warmup=1, configuration=configuration)


def test_a_run_that_another_command_has_gone_on_with_is_not_taken_back(tmp_path):
    first, second = a_run(tmp_path, 5), a_run(tmp_path, 2)
    assert [*first] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="one has written a checkpoint to .* meanwhile: run the command again"):
        next(iter(second))
    assert a_run(tmp_path, 5).step == 5


@pytest.mark.parametrize("state, message", [
    (None, "size mismatch|Error.s. in loading state_dict"), ({"version": 3}, "'model'"), ([], "list"),
    ({"version": 3, "model": 1}, ""), ({"version": 3, "configuration": [1]}, "")])
def test_a_checkpoint_of_another_run_is_named(tmp_path, state, message):
    if state is None:
        [*a_run(tmp_path, 1, width=2)]
    else:
        torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=rf"checkpoint.pt cannot be read: .*({message}).*; it is of another run"):
        a_run(tmp_path, 2)


def test_a_checkpoint_of_another_configuration_or_version_says_which(tmp_path):
    [*a_run(tmp_path, 1, layers=6, head_dim=64)]
    with pytest.raises(ValueError, match=r"checkpoint.pt is of another configuration: layers is 6 there and 12 here, "
                                         "head_dim is 64 there and 32 here; choose another --runs, or remove it"):
        a_run(tmp_path, 2, head_dim=32, layers=12)
    torch.save({"model": {}, "step": 3}, tmp_path / "falling.pt")
    with pytest.raises(ValueError, match=r"falling.pt is a checkpoint of version 1, this program reads version 3: "):
        a_run(tmp_path, 2, layers=6, head_dim=64)


def test_a_checkpoint_of_other_inputs_says_which(tmp_path):
    """A checkpoint holds frozen parts of the target that it was trained on. They would not fit a new target."""
    for name in ("tokens", "words"):
        (tmp_path / name).write_text(name)
    trained = {"lr": 0.1, "weight_decay": 0, "minutes": None, "inputs": {n: tmp_path / n for n in ("tokens", "words")}}
    [*TrainingRun(tmp_path / "run", nn.Linear(1, 1), steps=1, **trained)]
    assert TrainingRun(tmp_path / "run", nn.Linear(1, 1), steps=2, **trained).step == 1
    (tmp_path / "words").write_text("others")
    with pytest.raises(ValueError, match="checkpoint.pt was trained with another words: choose another --runs, or rem"):
        TrainingRun(tmp_path / "run", nn.Linear(1, 1), steps=2, **trained)


def test_a_fall_over_steps_is_not_one_over_minutes(tmp_path):
    arguments = {"lr": 0.1, "weight_decay": 0, "warmup": 1}
    [*TrainingRun(tmp_path, nn.Linear(1, 1), minutes=None, steps=10, **arguments)]
    run = TrainingRun(tmp_path, nn.Linear(1, 1), minutes=10.0, steps=None, **arguments)
    assert run.step == 8 and rates(run, stop=20) == [0.1] * 12
    with pytest.raises(ValueError, match="set at most one of minutes and steps, got minutes=1, steps=2"):
        TrainingRun(tmp_path, nn.Linear(1, 1), minutes=1, steps=2, **arguments)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_short_run_can_be_ended_twice(tmp_path, steps):
    """It is over before its rate falls: the same command has nothing to do."""
    assert [*a_run(tmp_path, steps)] == [*range(steps)] and [*a_run(tmp_path, steps)] == []
    assert [*a_run(tmp_path, steps + 1)] == [steps]


@pytest.mark.parametrize("room", [500, 2000])
def test_on_a_full_disk_the_last_checkpoint_stays(tmp_path, room):
    [*a_run(tmp_path, 10)]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(room), pytest.raises(OSError, match="File too large.*checkpoint.pt"):
        [*a_run(tmp_path, 20)]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with full_disk(10), pytest.raises(OSError, match="File too large.*log.jsonl"):
        a_run(tmp_path / "other", 1).log(loss=1 / 3)


@pytest.mark.parametrize("content", [b"", b"PK\3\4aaaaaaaa", b"x" * 100])
def test_hurt_pictures_are_one_line_and_status_2(content, tmp_path):
    """And if they are not hurt, the tokenizer needs a length."""
    pictures(tmp_path / "data")
    assert "minutes or steps must be set" in run("tokenizer", "--runs", tmp_path, status=2).output
    (tmp_path / "data" / "pictures.npz").write_bytes(content)
    result = run("tokenizer", "--runs", tmp_path, "--steps", 1)
    assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
    assert "pictures.npz cannot be read: " in result.output
    assert "; run `python -m training data` again\n" in result.output


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path):
    before, steps = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        for step in a_run(tmp_path, 5):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            steps.append(step)
    assert not steps and signal.getsignal(signal.SIGINT) is before


def test_the_diffusion_loss_is_the_divergence_of_its_gaussians():
    torch.manual_seed(0)
    diffloss, schedule = DiffLoss(2, 4, 8, 1, num_train_timesteps=20, num_sampling_steps=5), Schedule(20, 20)
    torch.nn.init.normal_(diffloss.net.final_layer.linear.weight)
    z, tokens = torch.randn(3, 4), torch.randn(3, 2)
    timesteps, noise = torch.tensor([[1, 2, 20], [7, 1, 3]]), torch.randn(2, 3, 2)
    noise_loss, bits = diffusion_loss(diffloss, schedule, z, tokens, timesteps, noise)
    denoiser, errors, bounds = diffloss.denoiser(z), [], []
    denoiser.schedule = schedule
    denoiser.time_embeddings = diffloss.net.time_embed(schedule.table(z.device)[:, 0])
    for m in range(2):
        for n in range(3):
            t = int(timesteps[m, n])
            share = schedule.alpha_bar[t - 1]
            x = (share.sqrt() * tokens[n] + (1 - share).sqrt() * noise[m, n]).float()
            mean, log_sigma = (part[n] for part in denoiser.transition(x.expand(3, -1), t))
            own = Normal(mean, log_sigma.exp())
            if t == 1:
                bounds.append(-own.log_prob(tokens[n]))
            else:
                centre = schedule.posterior_mean_coef1[t - 1] * tokens[n] + schedule.posterior_mean_coef2[t - 1] * x
                bounds.append(kl_divergence(Normal(centre.float(), schedule.min_log_sigma[t - 1].exp().float()), own))
            start = (schedule.alpha_bar[t - 1].rsqrt() * x).float()
            told = (start - (mean - schedule.posterior_mean_coef2[t - 1] * x) / schedule.posterior_mean_coef1[t - 1])
            errors.append((told / (1 / schedule.alpha_bar[t - 1] - 1).sqrt() - noise[m, n]).square())
    assert noise_loss.item() == pytest.approx(torch.stack(errors).mean().item(), rel=1e-2)
    assert bits.item() == pytest.approx(torch.stack(bounds).mean().item() / math.log(2), rel=1e-3)


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_in_training_is_that_of_the_model(is_masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(3))
    mask = (torch.rand(2, 1, 5, 5, generator=generator) < 0.5) | torch.eye(5, dtype=torch.bool) if is_masked else None
    assert torch.allclose(attend(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask), atol=1e-6)


def test_the_bound_trains_the_variance_alone():
    diffloss = DiffLoss(2, 4, 8, 1, num_train_timesteps=20, num_sampling_steps=5)
    timesteps, noise = torch.randint(1, 21, (2, 3)), torch.randn(2, 3, 2)
    _, bits = diffusion_loss(diffloss, Schedule(20, 20), torch.randn(3, 4), torch.randn(3, 2), timesteps, noise)
    bits.backward()
    gradient = diffloss.net.final_layer.linear.bias.grad
    assert (gradient[:2] == 0).all() and (gradient[2:] != 0).all()


def test_scaled_tokens_have_variance_1():
    latents = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2, 3]) + 5
    scaling = Scaling.of(latents)
    tokens = scaling.tokens(latents)
    assert tokens.mean(0).abs().max() < 1e-5 and tokens.var(0).mean().item() == pytest.approx(1)
    assert torch.allclose(scaling.latents(tokens), latents, atol=1e-5)


def test_a_name_becomes_words_with_one_for_a_skin_tone():
    assert words_of("waving-hand-medium-dark-skin-tone") == ["waving", "hand", "skin-medium-dark"]
    assert words_of(spelled_out("man-pilot-dark", "People & Body")) == ["man", "pilot", "skin-dark"]
    assert words_of(spelled_out("hat-dark", "Objects")) == ["hat", "dark"]


def test_a_held_out_name_is_held_out_in_every_spelling():
    names = [f"name-{i}" for i in range(400)] + ["pilot-man", "man-pilot"]
    words = [name.split("-") for name in names]
    words = [["thing", str(int(w[1]) % 20)] if w[0] == "name" else w for w in words]
    held_out = hold_out(names, words)
    groups = {}
    for w, out in zip(words, held_out):
        groups.setdefault(frozenset(w), set()).add(bool(out))
    assert all(len(states) == 1 for states in groups.values())


def test_the_shipped_weights_are_small_enough_to_ship():
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 48e6
    assert Pipeline.load().gpt.config.tokens == 256
