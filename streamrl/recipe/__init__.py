"""The experiment: everything that a researcher changes, as plain functions beside their formulas.

    rewards.py      what a completion is worth                       rewards.NAME.target
    advantages.py   what that is beside the others of its group      algorithm.advantages
    losses.py       how each token counts in today's loss            algorithm.loss
                    how far the policy has come from its reference   algorithm.kl.estimator
    algorithms.py   which groups and samples are trained at all      algorithm.name
    own.py          a function of yours in the place of one of these

Whoever only reads or checks a configuration imports this too, so torch is imported for its types alone: formulas are
written with the methods of tensors. `docs/recipes.md` adds a loss and an advantage, step by step.
"""
