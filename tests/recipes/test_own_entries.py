"""Entries that a user's script registers, chosen on the command line, with workers in processes of Ray."""

import pytest

from tests.recipes.command import metrics

pytestmark = pytest.mark.slow

OWN = ["algorithm.advantage.name=mine", "algorithm.advantage.options.factor=4",
       "algorithm.loss.name=mine", "algorithm.loss.options.factor=0.5",
       "algorithm.aggregation=mine", "algorithm.aggregation_options.factor=0.25",
       "algorithm.corrections=[{name: mine, options: {factor: 2}}]",
       "algorithm.keep_masks=[{name: mine, options: {lowest: -1000}}]",
       "algorithm.kl.estimator=mine", "algorithm.kl.options.factor=4"]
"""Their factors cancel: in the policy loss 4 * 0.5 * 0.25 * 2, in the penalty 4 * 0.25."""


def test_an_entry_of_ones_own_in_every_table(run, grpo, tmp_path):
    options = [*grpo[1:], "policy.rollout.engine=transformers", "trainer.trackers=[]", "trainer.export=false",
               "algorithm.kl.coefficient=0.5"]
    run("tests.recipes.own_entries", *options, *OWN, "cluster.backend=ray", f"trainer.run_dir={tmp_path / 'own'}")
    run("recipes.grpo", *options, "algorithm.kl.estimator=k2", f"trainer.run_dir={tmp_path / 'plain'}")
    own, plain = metrics(tmp_path / "own"), metrics(tmp_path / "plain")
    for step in (1, 2):
        assert own[step]["advantage/max"] == pytest.approx(4 * plain[step]["advantage/max"], rel=1e-4)
        assert own[step]["train/grad_norm"] == pytest.approx(plain[step]["train/grad_norm"], rel=1e-4)
        assert own[step]["train/loss"] == pytest.approx(plain[step]["train/loss"], rel=1e-3, abs=1e-5)
    assert plain[2]["policy/kl_loss"] > 1e-5 and own[2]["policy/kept_frac"] == 1
