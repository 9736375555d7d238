"""The handshake without I/O: who passes, and what cannot pass."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medialane.types.errors import AuthenticationFailed
from medialane.wire import Role
from medialane.wire.authentication import GREETING_BYTES, PROOF_BYTES, Handshake, Secrets

OURS, OTHERS = Secrets([b"our shared secret"]), Secrets([b"of someone else.."])


def dialler(secrets=OURS, **changed):
    return Handshake(
        secrets, is_dialler=True, **{"protocol": "rpc", "role": Role.GATEWAY, "peer_role": Role.WORKER, **changed}
    )


def listener(secrets=OURS, **changed):
    return Handshake(
        secrets, is_dialler=False, **{"protocol": "rpc", "role": Role.WORKER, "peer_role": Role.GATEWAY, **changed}
    )


def run(one, other):
    """Exchange everything that both sides send; return what each has sent."""
    sent = {one: one.greeting, other: other.greeting}
    side, peer, data = one, other, other.greeting
    other.receive(one.greeting)
    while data:  # the dialler answers first
        data = side.receive(data)
        sent[side] += data
        side, peer = peer, side
    return sent[one], sent[other]


def recorded(one, other):
    run(one, other)
    return one, other


def test_both_sides_are_authenticated_with_fixed_sizes():
    one, other = dialler(), listener()
    for sent in run(one, other):
        assert len(sent) == GREETING_BYTES + PROOF_BYTES
    assert one.is_complete
    assert other.is_complete
    assert (one.num_missing_bytes, other.num_missing_bytes) == (0, 0)


@given(st.data())
def test_splitting_of_the_stream_does_not_matter(data):
    one, other = dialler(), listener()
    pending = {other: one.greeting, one: other.greeting}
    while any(pending.values()):
        side = data.draw(st.sampled_from([each for each, rest in pending.items() if rest]))
        size = data.draw(st.integers(1, len(pending[side])))
        chunk, pending[side] = pending[side][:size], pending[side][size:]
        pending[one if side is other else other] += side.receive(chunk)
    assert one.is_complete
    assert other.is_complete


def test_bytes_after_the_handshake_are_left_to_the_caller():
    one, other = dialler(), listener()
    proof = one.receive(other.greeting)
    other.receive(one.greeting)
    one.receive(other.receive(proof) + b"the first message")
    assert one.rest == b"the first message"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dialler(OTHERS), listener()),
        (dialler(), listener(OTHERS)),
        (dialler(Secrets()), listener()),
        (dialler(), listener(Secrets())),
        (dialler(protocol="pull"), listener()),
        (dialler(channel=bytes(31) + b"a"), listener()),
        (dialler(channel=bytes(31) + b"a"), listener(channel=bytes(31) + b"b")),
    ],
    ids=["secret", "listener's secret", "no secret", "unexpected secret", "protocol", "TLS on one side", "TLS relay"],
)
def test_different_sides_are_refused_by_the_listener_without_an_answer(one, other):
    proof = one.receive(other.greeting)
    other.receive(one.greeting)
    with pytest.raises(AuthenticationFailed, match="secret"):
        other.receive(proof)
    assert not other.is_complete
    assert not one.is_complete


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (dialler(role=Role.STORE), listener(), "is a store, not a gateway"),
        (dialler(), listener(role=Role.GATEWAY), "is a gateway, not a worker"),
        (dialler(role=7), listener(), "is a process of role 7"),
    ],
)
def test_unexpected_role_is_refused_by_name(one, other, found):
    with pytest.raises(AuthenticationFailed, match=found):
        run(one, other)


def test_role_does_not_depend_on_who_dials():
    one = dialler(role=Role.WORKER, peer_role=Role.GATEWAY)
    other = listener(role=Role.GATEWAY, peer_role=Role.WORKER)
    run(one, other)
    assert one.is_complete
    assert other.is_complete


def test_either_of_two_secrets_is_accepted_and_the_first_is_used():
    before, after = b"secret of last year", b"secret of this year"
    steps = [Secrets([before]), Secrets([before, after]), Secrets([after, before]), Secrets([after])]
    for old, new in itertools.pairwise(steps):
        for one, other in ((old, new), (new, old), (new, new)):
            sides = recorded(dialler(one), listener(other))
            assert all(side.is_complete for side in sides)
    with pytest.raises(AuthenticationFailed):
        run(dialler(steps[0]), listener(steps[3]))


def test_reflected_greeting_is_refused():
    for side in (dialler(), listener()):
        with pytest.raises(AuthenticationFailed, match="reflects"):
            side.receive(side.greeting)


def test_listener_proves_nothing_to_a_peer_that_has_not():
    """Otherwise anyone could collect material to guess the secret."""
    other = listener()
    assert other.receive(dialler().greeting) == b""


def test_reflected_proof_is_refused():
    """An attacker opens a connection to the dialler's own listener, and returns the proof that it got."""
    victim, attacker = dialler(), dialler()
    proof = victim.receive(listener().greeting)
    with pytest.raises(AuthenticationFailed):
        victim.receive(proof)
    own = listener()
    own.receive(attacker.greeting)
    with pytest.raises(AuthenticationFailed):
        own.receive(proof)


@pytest.mark.parametrize("is_dialler", [False, True])
def test_replayed_transcript_is_refused(is_dialler):
    first, second = run(dialler(), listener())
    side, transcript = (dialler(), second) if is_dialler else (listener(), first)
    with pytest.raises(AuthenticationFailed):
        side.receive(transcript)
    assert not side.is_complete


@given(st.integers(0, GREETING_BYTES + PROOF_BYTES - 1), st.integers(1, 255), st.booleans())
def test_any_changed_byte_is_refused(position, mask, by_dialler):
    """A change of one side's greeting invalidates the proofs of both."""
    one, other = dialler(), listener()
    attacked, victim = (one, other) if by_dialler else (other, one)

    def tampered(data, start):
        changed = bytearray(data)
        if start <= position < start + len(data):
            changed[position - start] ^= mask
        return bytes(changed)

    def exchange():
        early = victim.receive(tampered(attacked.greeting, 0))
        answer = attacked.receive(victim.greeting + early)
        attacked.receive(victim.receive(tampered(answer, GREETING_BYTES)))

    with pytest.raises(AuthenticationFailed):
        exchange()
    assert not victim.is_complete


@given(st.lists(st.binary(max_size=200), max_size=5), st.booleans(), st.booleans())
def test_garbage_never_passes_and_is_not_buffered(chunks, is_dialler, after_greeting):
    side, peer = (dialler(), listener()) if is_dialler else (listener(), dialler())
    if after_greeting:
        side.receive(peer.greeting)
    try:
        for chunk in chunks:
            side.receive(chunk)
            assert side.num_missing_bytes > 0
    except AuthenticationFailed:
        pass
    assert not side.is_complete


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"GET /", "not a process of medialane"),
        (b"\x00\x00\x00\x10", "not a process of medialane"),
        (b"\x16\x03\x01", "uses TLS"),
        (b"\x15", "uses TLS"),
        (dialler().greeting[:7] + b"\x63", "another version"),
    ],
)
def test_other_protocols_are_refused_at_their_first_bytes(first, reason):
    with pytest.raises(AuthenticationFailed, match=reason):
        listener().receive(first)


def test_secret_is_in_no_repr():
    assert "our shared secret" not in f"{OURS!r} {OURS}"
    assert (bool(OURS), bool(Secrets())) == (True, False)
