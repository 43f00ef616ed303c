"""Values that cross borders: config, errors, requests, batches, devices. Imports nothing else of Sightline."""
