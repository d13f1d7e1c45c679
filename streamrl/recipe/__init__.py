"""The experiment: everything that a researcher changes, as plain functions beside their formulas.

    rewards.py      what a completion is worth                       rewards.NAME.target
    advantages.py   its value relative to the rest of its group      algorithm.advantages
    losses.py       how each token counts in the current loss        algorithm.loss
                    how far the policy is from its reference         algorithm.kl.estimator
    algorithms.py   which groups and samples are trained at all      algorithm.name
    own.py          your own function in place of one of these

Reading or checking a configuration imports this too, so torch is imported for its types only: formulas use the methods
of tensors. `docs/recipes.md` adds a loss and an advantage, step by step.
"""
