"""The probe leaves no trace in training."""

import pytest

from cairn.model.training.training_loop import Probe
from tests.model.tiny_run import TinyRun


def make(run, **changes):
    settings = {"probe_every_steps": 2, "probe_batches": 2, "sample_tokens": 5, **changes}
    training = run.training.model_copy(update=settings)
    return Probe(windows=run.windows, training=training, prompt_ids=(0,), decode=lambda ids: " ".join(map(str, ids)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_with_a_probe_gives_the_bits_of_training_without(tiny_run: type[TinyRun], precision) -> None:
    probed, plain = (tiny_run(precision=precision, model={"dropout": 0.2}) for _ in range(2))
    probed.train(7, probe=make(probed))
    plain.train(7)
    assert probed.bits() == plain.bits()


def test_the_probe_is_due_every_so_many_steps(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    records = run.train(5, probe=make(run))
    assert [record.step for record in records if record.probe_loss is not None] == [2, 4]


def test_a_probe_that_is_due_brings_loss_and_sample(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    record = run.train(2, probe=make(run))[-1]
    assert 3 < record.probe_loss < 5 and len(record.sample.split()) == 5


def test_without_sample_tokens_there_is_no_sample(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    assert make(run, sample_tokens=0).measure(run.state.model)[1] is None


def test_the_model_is_back_in_its_mode_after_a_probe(tiny_run: type[TinyRun]) -> None:
    run = tiny_run()
    for mode in (True, False):
        run.state.model.train(mode)
        make(run).measure(run.state.model)
        assert run.state.model.training is mode
