"""Every error that streamrl raises on purpose.

StreamrlError
├── UserError            the user can mend it: one clear line, exit code 2
│   ├── ConfigError      a setting is unknown, of the wrong type, or contradicts another
│   ├── DataError        a data set, model folder or tokenizer is not as it must be
│   └── ResourceError    something the run needs is not there: Redis, a port, vLLM, disk
├── WireError            a message that does not follow the schema or exceeds a limit
├── TransportError       Redis, or the store of weights, did not answer within its bounds
│   ├── Fenced           a newer learner term exists; this process must stop at once
│   │   └── Replaced     another learner has taken the run over: this one does not come back
│   ├── Refused          another learner holds the run
│   ├── Ended            an operator has ended the run since this learner began
│   ├── RunGone          the run's tombstone is there: it was removed, leave
│   └── ServerFull       Redis takes no more until there is room (maxmemory, its disk); nothing was written
├── WeightsError         a blob, manifest, or digest is missing or wrong
│   └── LoadRejected     the engine did not prove that it serves what was loaded
├── EngineError          the generation engine died or does not make progress
├── SampleError          the engine refused one sample, and goes on
├── RewardError          no score could be had for a sample; never a number
│   └── RewardOutage     nobody could be scored, which is no fault of the sample
├── PartError            a part that the launcher started ended, and another start would not help
└── TrainingError        training cannot go on: non-finite steps in a row, publish stuck
"""

from __future__ import annotations


class StreamrlError(Exception):
    """Base of every deliberate error; its text says what happened and what to do."""

    exit_code = 1


class UserError(StreamrlError):
    exit_code = 2


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class ResourceError(UserError):
    pass


class WireError(StreamrlError):
    pass


class TransportError(StreamrlError):
    pass


class Fenced(TransportError):
    pass


class Replaced(Fenced):
    exit_code = UserError.exit_code  # as what a restart does not change


class Refused(TransportError):
    exit_code = UserError.exit_code


class Ended(TransportError):
    exit_code = 0  # as it was told


class RunGone(TransportError):
    pass


class ServerFull(TransportError):
    pass


class WeightsError(StreamrlError):
    pass


class LoadRejected(WeightsError):
    pass


class EngineError(StreamrlError):
    pass


class SampleError(StreamrlError):
    pass


class RewardError(StreamrlError):
    pass


class RewardOutage(RewardError):
    pass


class PartError(StreamrlError):
    pass


class TrainingError(StreamrlError):
    pass
