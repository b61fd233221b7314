"""Preemption (pure): all candidates are handed back as they came, in the form wanted.

nearkv does not judge who should make room. Asked nevertheless (``preemptVerb``), it must keep
every candidate: one that is left out can no longer be chosen. From Kubernetes 1.38 on,
candidates with no victims at all come too, and stay. The answer names victims by UID, whatever
the form of the question.
"""

import msgspec

from nearkv.extender.errors import BadRequestError
from nearkv.extender.wire import Buffer, Mode, read_json


class _VictimMeta(msgspec.Struct, frozen=True):
    uid: str


class _Victim(msgspec.Struct, frozen=True):
    metadata: _VictimMeta


class _Victims(msgspec.Struct, frozen=True):
    pods: list[_Victim] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class _MetaVictim(msgspec.Struct, frozen=True):
    uid: str = msgspec.field(name="UID")


class _MetaVictims(msgspec.Struct, frozen=True):
    pods: list[_MetaVictim] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class _Arguments(msgspec.Struct, frozen=True):
    victims: dict[str, _Victims] | None = msgspec.field(name="NodeNameToVictims", default=None)
    meta_victims: dict[str, _MetaVictims] | None = msgspec.field(
        name="NodeNameToMetaVictims", default=None
    )


class _Result(msgspec.Struct, frozen=True):
    victims: dict[str, _MetaVictims] = msgspec.field(name="NodeNameToMetaVictims")


def answer_preemption(body: Buffer) -> tuple[Mode, int, bytes]:
    """Return the mode, the number of candidates and the ExtenderPreemptionResult.

    Raises :class:`BadRequestError`.
    """
    given = read_json(msgspec.json.Decoder(_Arguments), body, what="the body")
    if given.meta_victims is not None:
        mode, found = Mode.NAMES, given.meta_victims
    elif given.victims is not None:
        mode, found = Mode.NODES, {name: _by_uid(v) for name, v in given.victims.items()}
    else:
        raise BadRequestError(
            "neither NodeNameToVictims nor NodeNameToMetaVictims is given", reason="no_nodes"
        )
    kept = {
        name: _MetaVictims(victims.pods or [], victims.violations)
        for name, victims in found.items()
    }
    return mode, len(kept), msgspec.json.encode(_Result(kept))


def _by_uid(victims: _Victims) -> _MetaVictims:
    uids = [_MetaVictim(victim.metadata.uid) for victim in victims.pods or ()]
    return _MetaVictims(uids, victims.violations)
