// The conversations that this browser keeps, in IndexedDB. Where that is off or full, they last as long as the page.
import { revived } from "./conversation.js";

const NAME = "sightline";
const STORE = "conversations";
const channel = new BroadcastChannel(NAME); // to other tabs
let database = null;

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
  return database;
}

async function changed(action) { // resolves to whether the change is kept
  try {
    const transaction = (await opened()).transaction(STORE, "readwrite");
    action(transaction.objectStore(STORE));
    transaction.commit(); // at once: a page that is left before its requests have answered would abort it
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
    return true;
  } catch { // off, full, or closed by the browser
    return false;
  }
}

export async function keep(conversation) {
  const kept = await changed((records) => records.put(conversation));
  if (kept) channel.postMessage(conversation.id);
  return kept;
}

export async function forget(id) {
  const gone = await changed((records) => records.delete(id));
  if (gone) channel.postMessage(id);
  return gone;
}

// {conversations, unreadable}: the latest first. Rejects if the storage is off.
export async function keptConversations() {
  const records = (await opened()).transaction(STORE).objectStore(STORE);
  const all = (await settled(records.getAll())).map(revived);
  const conversations = all.filter(Boolean).sort((one, other) => other.updated - one.updated);
  return { conversations, unreadable: all.length - conversations.length };
}

export function onChangeElsewhere(action) {
  channel.onmessage = (event) => action(event.data);
}
