"""The server's side of TLS."""

from __future__ import annotations

import ssl

from engine.entrypoints.config import SecurityConfig
from engine.errors import ConfigError


def tls_context(config: SecurityConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the configured files, or None when none is configured.

    With `tls_client_ca` only clients with a certificate from there are let in. Raises ConfigError
    naming the file that cannot be used.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    for name, path in (("tls_cert", config.tls_cert), ("tls_key", config.tls_key),
                       ("tls_client_ca", config.tls_client_ca)):  # fmt: skip
        if path is not None:
            _require_readable(name, path)
    try:
        # An encrypted key would ask for its password on the terminal: refuse it instead.
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert {config.tls_cert} and tls_key {config.tls_key} are no certificate and its "
            f"key in PEM: {_reason(error)}"
        ) from error
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_client_ca {config.tls_client_ca} holds no certificates in PEM: "
                f"{_reason(error)}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ConfigError("tls_key is encrypted: give a key without a password")


def _require_readable(name: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
