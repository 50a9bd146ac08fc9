"""The join over ticks that are still kept, and how its events are held against the first run's."""
