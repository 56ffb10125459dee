"""The forwarder without Ray, Serve or Triton."""
