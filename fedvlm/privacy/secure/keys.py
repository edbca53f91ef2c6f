"""Key agreement, masks and sealed shares: X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 and ChaCha20-Poly1305
(RFC 8439), all from the package `cryptography`."""

from __future__ import annotations

import hashlib

import numpy as np

from fedvlm.errors import BadMessage, FedvlmError
from fedvlm.privacy.secure.messages import KEY, Integers

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise FedvlmError(
        "secure=true between processes or machines needs the package cryptography; pip install 'fedvlm[secure]'"
    ) from error

BLOCK = 1 << 18  # bytes of a mask drawn at a time: they stay in the cache until they are added
ZEROS = bytes(BLOCK)


class KeyPair:
    def __init__(self, private: bytes):
        self.private, self._key = private, X25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes_raw()

    def agree(self, other: bytes, binding: bytes, purpose: bytes) -> bytes:
        """The key that both derive from their own private and the other's public key, for one round and purpose."""
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:  # a point of small order, which would make the key known to everybody
            raise BadMessage("public keys: one is not a key") from error
        return derive(secret, binding, purpose)


def derive(secret: bytes, binding: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY, salt=binding, info=purpose).derive(secret)


def add_mask(vector: Integers, key: bytes, subtract: bool = False) -> None:
    """Adds the ChaCha20 stream of this key to a vector of 32- or 64-bit integers, in place. The key is used once."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    buffer, combine = np.empty(BLOCK, np.uint8), np.subtract if subtract else np.add
    width = BLOCK // vector.itemsize
    for first in range(0, len(vector), width):
        part = vector[first : first + width]
        stream.update_into(memoryview(ZEROS)[: part.nbytes], buffer)  # type: ignore[arg-type]
        combine(part, buffer.view(vector.dtype)[: len(part)], out=part)


def seal(key: bytes, sender: int, context: bytes, content: bytes) -> bytes:
    """Encrypted and authenticated; of one key, each of the two parties sends once."""
    return ChaCha20Poly1305(key).encrypt(nonce(sender), content, context)


def unseal(key: bytes, sender: int, context: bytes, sealed: bytes) -> bytes | None:
    """None where it was changed on the way, or was not meant for this key."""
    try:
        return ChaCha20Poly1305(key).decrypt(nonce(sender), sealed, context)
    except InvalidTag:
        return None


def nonce(sender: int) -> bytes:
    return sender.to_bytes(12, "little")


def commitment(secret: bytes) -> bytes:
    """Lets the server see whether it put a secret together rightly; of 32 random bytes it tells nothing."""
    return hashlib.sha256(b"fedvlm secure own mask" + secret).digest()
