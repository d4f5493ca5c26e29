"""Posteriors over the weights of a kernel of finite rank."""
