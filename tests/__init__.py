"""Tests of nearkv, laid out like the tree they test."""
