"""Posteriors of functions of time by Kalman filtering and smoothing."""
