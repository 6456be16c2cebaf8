"""Verifies Ed25519 signatures (RFC 8032) with the standard library alone, in some milliseconds.

It only verifies, and so handles nothing that is secret. For signing, and for many signatures a second, take a library.
"""

import hashlib

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493  # the order of the base point
_D = -121665 * pow(121666, -1, _P) % _P

# Points are (X, Y, Z, T) with x = X/Z, y = Y/Z and x*y = T/Z (RFC 8032, section 5.1.4).
_ZERO = (0, 1, 1, 0)


def _add(p, q):
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % _P, (p[1] + p[0]) * (q[1] + q[0]) % _P
    c, d = 2 * p[3] * q[3] * _D % _P, 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(n, p):
    q = _ZERO
    while n:
        if n & 1:
            q = _add(q, p)
        p, n = _add(p, p), n >> 1
    return q


def _decode(b):
    """The point that 32 bytes stand for; None when they stand for none (section 5.1.3)."""
    y = int.from_bytes(b, "little")
    odd, y = y >> 255, y & (1 << 255) - 1
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    if (x * x - square) % _P or x == 0 and odd:
        return None
    if x & 1 != odd:
        x = _P - x
    return x, y, 1, x * y % _P


def _encode(p):
    inverse = pow(p[2], -1, _P)
    x, y = p[0] * inverse % _P, p[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


_BASE = _decode((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))


def verify(key, message, signature):
    """Says whether signature (64 bytes) is that of message by the holder of the public key (32 bytes)."""
    if len(key) != 32 or len(signature) != 64:
        return False
    a, r, s = _decode(key), signature[:32], int.from_bytes(signature[32:], "little")
    if a is None or s >= _L:
        return False
    h = int.from_bytes(hashlib.sha512(r + key + message).digest(), "little") % _L
    minus = (_P - a[0], a[1], a[2], _P - a[3])
    return _encode(_add(_times(s, _BASE), _times(h, minus))) == r
