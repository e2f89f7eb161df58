"""Fakes and conformance suites, shipped so that users can test too."""
