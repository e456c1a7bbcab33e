"""An async client of the models (docs/clients.md). These names are public and stay."""

from trtllm_bls.client.client import BLS, ENGINE, Client, Event, Model, Result, Stream, Tls

__all__ = ["BLS", "ENGINE", "Client", "Event", "Model", "Result", "Stream", "Tls"]
