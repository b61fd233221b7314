"""The chaos run: every part of a small nearkv killed, stopped and slowed at random, under load."""
